//! Videos as frames: pictures of one size, one behind the other.

use crate::{Budget, MediaError, Pixels, SizeError, decode_picture};

/// A video in canonical form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frames {
    /// Height and width of each frame.
    pub size: Pixels,
    /// Number of frames.
    pub count: usize,
    /// Pixels, `[count, height, width, 3]`.
    pub pixels: Vec<u8>,
}

/// Decodes frames, and resizes them to the size that `size` gives for their own. All must have the size of the first.
/// After an error, memory for frames before it stays taken.
pub fn decode_frames(
    frames: &[&[u8]],
    budget: &mut Budget<'_>,
    size: impl Fn(Pixels) -> Result<Pixels, MediaError>,
) -> Result<Frames, MediaError> {
    let mut all = Frames { size: [0, 0], count: 0, pixels: Vec::new() };
    let mut first: Option<Pixels> = None;
    for (index, data) in frames.iter().enumerate() {
        let mut is_other = false;
        let decoded = decode_picture(data, budget, |own| {
            is_other = *first.get_or_insert(own) != own;
            // The error is replaced below.
            if is_other { Err(SizeError::Limits.into()) } else { size(own) }
        });
        if is_other {
            return Err(MediaError::OtherSize { index });
        }
        let picture = decoded.map_err(|error| match error {
            MediaError::NoMemory(_) | MediaError::TooSlow | MediaError::TooLarge { .. } => error,
            error => MediaError::Frame { index, error: Box::new(error) },
        })?;
        let bytes = picture.pixels.len();
        if index == 0 {
            // Room for all at once, because a vector that grows has its bytes twice.
            let total = bytes.saturating_mul(frames.len());
            budget.take(total)?;
            all.pixels.reserve_exact(total);
            all.size = picture.size;
        }
        all.pixels.extend_from_slice(&picture.pixels);
        all.count += 1;
        budget.memory.give(bytes);
    }
    if all.count == 0 { Err(MediaError::NoFrames) } else { Ok(all) }
}

#[cfg(test)]
mod tests;
