//! Patches of pictures: the input of a vision encoder, from the pixels of frames that already have the right size.

use super::{config::CHANNELS, grid::PatchGrid};

/// The conversion of a colour's bytes to values: `(byte / 255 - mean) / deviation`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Channel {
    pub mean: f32,
    pub deviation: f32,
}

/// The sizes of a model's patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PatchSizes {
    /// Pixels per side of a patch.
    pub patch: usize,
    /// Frames per patch.
    pub temporal: usize,
    /// Patches per side of a token.
    pub merge: usize,
}

/// Returns the values of the patches of a picture or of frames, in the order of [`PatchGrid`]. `frames` are the pixels
/// of each frame, `[height, width, 3]`. If the last patches lack frames, the last frame is repeated; so a picture fills
/// all frames of its patches. Returns `None` unless frames are of whole tokens.
///
/// A patch is `[colours, frames, lines, columns]`. All computation is in f32, in the order of the reference.
pub(crate) fn patches(
    frames: &[&[u8]],
    [height, width]: [usize; 2],
    sizes: PatchSizes,
    channels: [Channel; CHANNELS],
) -> Option<(Vec<f32>, PatchGrid)> {
    let PatchSizes { patch, temporal, merge } = sizes;
    let grid =
        PatchGrid { frames: frames.len().div_ceil(temporal), height: height / patch, width: width / patch };
    let is_whole = |side: usize| side > 0 && side.is_multiple_of(patch * merge);
    let is_frame = |frame: &&[u8]| frame.len() == height * width * CHANNELS;
    let last =
        frames.last().filter(|_| is_whole(height) && is_whole(width) && frames.iter().all(is_frame))?;
    // The values of a colour are those of 256 bytes, so each is computed once.
    let values = channels.map(|Channel { mean, deviation }| {
        let value = |byte: usize| (byte as f32 / 255.0 - mean) / deviation;
        (0..256).map(value).collect::<Vec<f32>>()
    });
    let mut out = Vec::with_capacity(grid.patches() * CHANNELS * temporal * patch * patch);
    for first in (0..frames.len()).step_by(temporal) {
        for [line, column] in grid.coordinates(merge) {
            for (channel, values) in values.iter().enumerate() {
                for frame in (first..first + temporal).map(|frame| frames.get(frame).unwrap_or(last)) {
                    for y in line * patch..(line + 1) * patch {
                        let pixels = &frame[(y * width + column * patch) * CHANNELS..][..patch * CHANNELS];
                        out.extend(
                            pixels.chunks_exact(CHANNELS).map(|pixel| values[usize::from(pixel[channel])]),
                        );
                    }
                }
            }
        }
    }
    Some((out, grid))
}
