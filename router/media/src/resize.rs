//! The size of a picture in tokens, and the resizing of its pixels.
//!
//! Both are those of the reference, to the last bit: transformers `models/qwen2_vl/image_processing_pil_qwen2_vl.py`
//! (`smart_resize`), and the bicubic filter of Pillow up to version 12 (`src/libImaging/Resample.c`), which resizes
//! lines first and columns second. Later versions of Pillow sometimes resize columns first, and differ by up to 24 of
//! 255.

/// Maximum quotient of the longer side and the shorter side of a picture.
pub const MAX_ASPECT: usize = 200;
/// Bits behind the point of a coefficient.
const PRECISION: u32 = 22;
/// Half the width of the filter, in pixels of the larger scale.
const SUPPORT: f64 = 2.0;
/// Bytes per pixel.
const CHANNELS: usize = 3;

/// Height and width in pixels.
pub type Pixels = [usize; 2];

/// The sizes that a model takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeLimits {
    /// Pixels per side of a token.
    pub factor: usize,
    /// Minimum number of pixels of a picture.
    pub least: usize,
    /// Number of pixels above which a picture is made smaller. One that is far longer than wide may keep more, because
    /// no side becomes shorter than a token.
    pub most: usize,
}

/// The reason why a picture has no size in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// A side has no pixels.
    #[error("has no pixels")]
    Empty,
    /// A picture is too long for its width, or too wide for its height.
    #[error("has a side that is more than {MAX_ASPECT} times as long as the other")]
    Aspect,
    /// The limits allow no size for this picture.
    #[error("has no size within the model's limits")]
    Limits,
}

impl SizeLimits {
    /// Returns the size to which a picture is resized: multiples of [`Self::factor`] near its own size, or near a size
    /// of the same shape within the limits. Computed in f64, as in the reference.
    pub fn size(&self, [height, width]: Pixels) -> Result<Pixels, SizeError> {
        let (shorter, longer) = (height.min(width), height.max(width));
        if shorter == 0 {
            return Err(SizeError::Empty);
        }
        if longer as f64 / shorter as f64 > MAX_ASPECT as f64 {
            return Err(SizeError::Aspect);
        }
        let (sides, factor) = ([height as f64, width as f64], self.factor as f64);
        let pixels = |[height, width]: [f64; 2]| height * width;
        // Python rounds a half to the even neighbour.
        let near = sides.map(|side| (side / factor).round_ties_even() * factor);
        let sides = if pixels(near) > self.most as f64 {
            let shrink = (pixels(sides) / self.most as f64).sqrt();
            sides.map(|side| ((side / shrink / factor).floor() * factor).max(factor))
        } else if pixels(near) < self.least as f64 {
            let grow = (self.least as f64 / pixels(sides)).sqrt();
            sides.map(|side| (side * grow / factor).ceil() * factor)
        } else {
            near
        };
        // A picture that is far longer than wide may stay above the limit at a width of one token.
        let is_usable = |side: &f64| (1.0..=self.most as f64).contains(side);
        match sides.iter().all(is_usable) {
            true => Ok(sides.map(|side| side as usize)),
            false => Err(SizeError::Limits),
        }
    }

    /// The size to which the frames of a video are resized if the limits count the pixels of all frames, as in
    /// transformers `models/qwen3_vl/video_processing_qwen3_vl.py` (`smart_resize`). `per_patch` is the number of
    /// frames per patch. A video of fewer frames repeats its last.
    pub fn video_size(
        &self,
        frames: usize,
        per_patch: usize,
        [height, width]: Pixels,
    ) -> Result<Pixels, SizeError> {
        let (mut sides, factor) = ([height as f64, width as f64], self.factor as f64);
        if height.min(width) == 0 {
            return Err(SizeError::Empty);
        }
        // A frame that is smaller than a token is made larger first.
        if sides.iter().any(|side| *side < factor) {
            let scale = (factor / sides[0]).max(factor / sides[1]);
            sides = sides.map(|side| (side * scale).floor());
        }
        let (shorter, longer) = (sides[0].min(sides[1]), sides[0].max(sides[1]));
        if longer / shorter > MAX_ASPECT as f64 {
            return Err(SizeError::Aspect);
        }
        let (per_patch, frames) = (per_patch.max(1) as f64, frames.max(per_patch) as f64);
        let patches = (frames / per_patch).round_ties_even() * per_patch;
        let near = sides.map(|side| (side / factor).round_ties_even() * factor);
        let pixels = patches * near[0] * near[1];
        let sides = if pixels > self.most as f64 {
            let shrink = (frames * sides[0] * sides[1] / self.most as f64).sqrt();
            sides.map(|side| ((side / shrink / factor).floor() * factor).max(factor))
        } else if pixels < self.least as f64 {
            let grow = (self.least as f64 / (frames * sides[0] * sides[1])).sqrt();
            sides.map(|side| (side * grow / factor).ceil() * factor)
        } else {
            near
        };
        match sides.iter().all(|side| (1.0..=self.most as f64).contains(side)) {
            true => Ok(sides.map(|side| side as usize)),
            false => Err(SizeError::Limits),
        }
    }
}

/// The coefficients of one output pixel.
struct Coefficients {
    /// The first input pixel.
    first: usize,
    weights: Vec<i32>,
}

/// Resizes pixels, `[height, width, 3]`, from one size to another. Returns `None` if there are not as many pixels as
/// `from` says, if a side has none, or if a size has too many bytes to count. The caller bounds the memory of `to`.
pub fn resize(pixels: &[u8], from: Pixels, to: Pixels) -> Option<Vec<u8>> {
    resize_until(pixels, from, to, &|| false)
}

/// As [`resize`], until `is_late` is true at the beginning of a line.
pub(crate) fn resize_until(
    pixels: &[u8],
    from: Pixels,
    to: Pixels,
    is_late: &dyn Fn() -> bool,
) -> Option<Vec<u8>> {
    let wanted = from[0].checked_mul(from[1])?.checked_mul(CHANNELS)?;
    if pixels.len() != wanted || from.contains(&0) || to.contains(&0) {
        return None;
    }
    for [height, width] in [to, [from[0], to[1]]] {
        height.checked_mul(width)?.checked_mul(CHANNELS)?;
    }
    let lines = resample(pixels, from, to[1], Direction::Lines, is_late)?;
    resample(&lines, [from[0], to[1]], to[0], Direction::Columns, is_late)
}

/// The direction in which pixels are mixed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Lines,
    Columns,
}

/// Resizes each line or each column to `to` pixels.
fn resample(
    pixels: &[u8],
    [height, width]: Pixels,
    to: usize,
    direction: Direction,
    is_late: &dyn Fn() -> bool,
) -> Option<Vec<u8>> {
    let (from, step, size) = match direction {
        Direction::Lines => (width, CHANNELS, [height, to]),
        Direction::Columns => (height, width * CHANNELS, [to, width]),
    };
    if from == to {
        return Some(pixels.to_vec());
    }
    let coefficients: Vec<Coefficients> = (0..to).map(|index| coefficients(from, to, index)).collect();
    let mut out = Vec::with_capacity(size[0] * size[1] * CHANNELS);
    for line in 0..size[0] {
        if is_late() {
            return None;
        }
        for column in 0..size[1] {
            let (coefficients, start) = match direction {
                Direction::Lines => (&coefficients[column], line * width * CHANNELS),
                Direction::Columns => (&coefficients[line], column * CHANNELS),
            };
            let Coefficients { first, weights } = coefficients;
            for channel in 0..CHANNELS {
                let inputs = pixels[start + first * step + channel..].iter().step_by(step);
                let sum = weights.iter().zip(inputs).fold(1i64 << (PRECISION - 1), |sum, (weight, input)| {
                    sum + i64::from(*weight) * i64::from(*input)
                });
                out.push((sum >> PRECISION).clamp(0, 255) as u8);
            }
        }
    }
    Some(out)
}

/// Returns the coefficients of output pixel `index` of `to`, rounded away from zero at a half.
fn coefficients(from: usize, to: usize, index: usize) -> Coefficients {
    let scale = from as f64 / to as f64;
    let wide = scale.max(1.0);
    let (support, centre) = (SUPPORT * wide, (index as f64 + 0.5) * scale);
    let first = (centre - support + 0.5).max(0.0) as usize;
    let end = ((centre + support + 0.5) as usize).min(from);
    let weights: Vec<f64> =
        (first..end).map(|pixel| bicubic((pixel as f64 - centre + 0.5) * (1.0 / wide))).collect();
    let total: f64 = weights.iter().sum();
    let rounded = |weight: f64| {
        let scaled = weight / total * f64::from(1 << PRECISION);
        (scaled + 0.5f64.copysign(scaled)) as i32
    };
    Coefficients { first, weights: weights.into_iter().map(rounded).collect() }
}

/// The cubic filter with a = -0.5 (Keys, 1981).
fn bicubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    match x.abs() {
        x if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
        x if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests;
