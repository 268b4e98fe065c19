//! The orientation of a picture, as cameras note it in Exif.

use crate::Pixels;

/// Bytes per pixel.
const CHANNELS: usize = 3;
/// Number of the entry that holds the orientation.
const TAG: u16 = 0x0112;
/// The type of the entry: 16-bit numbers.
const SHORT: u16 = 3;
/// Maximum number of entries that are looked at.
const MAX_ENTRIES: usize = 256;

/// An orientation, from 1 to 8 as in Exif: which sides of the shown picture the first row and column of the pixels are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Orientation(u8);

impl Default for Orientation {
    fn default() -> Self {
        Self(1)
    }
}

impl Orientation {
    /// Reads the orientation from a block of Exif. A block that cannot be read has none.
    pub fn of_exif(block: &[u8]) -> Self {
        Self::find(block).unwrap_or_default()
    }

    fn find(block: &[u8]) -> Option<Self> {
        // WebP files may keep the marker of JPEG in front of the block.
        let block = block.strip_prefix(b"Exif\0\0").unwrap_or(block);
        let is_little = match block.get(..4)? {
            b"II*\0" => true,
            b"MM\0*" => false,
            _ => return None,
        };
        let short = |at: usize| {
            let bytes = block.get(at..at.checked_add(2)?)?.try_into().ok()?;
            Some(if is_little { u16::from_le_bytes(bytes) } else { u16::from_be_bytes(bytes) })
        };
        let long = block.get(4..8)?.try_into().ok()?;
        let first = if is_little { u32::from_le_bytes(long) } else { u32::from_be_bytes(long) } as usize;
        let entries = usize::from(short(first)?).min(MAX_ENTRIES);
        let at = (0..entries)
            .map(|entry| first.saturating_add(2 + entry * 12))
            .find(|at| short(*at) == Some(TAG) && short(at.saturating_add(2)) == Some(SHORT))?;
        let value = short(at.checked_add(8)?)?;
        u8::try_from(value).ok().filter(|value| (1..=8).contains(value)).map(Self)
    }

    /// The size of the shown picture.
    pub fn size(self, [height, width]: Pixels) -> Pixels {
        if self.is_turned() { [width, height] } else { [height, width] }
    }

    /// True if pixels need not move.
    pub fn is_upright(self) -> bool {
        self.0 == 1
    }

    /// True if rows become columns.
    fn is_turned(self) -> bool {
        self.0 >= 5
    }

    /// Moves the pixels, `[height, width, 3]`, to where they are shown.
    pub fn apply(self, pixels: &[u8], [height, width]: Pixels) -> Vec<u8> {
        let [to_height, to_width] = self.size([height, width]);
        let mut shown = Vec::with_capacity(pixels.len());
        for y in 0..to_height {
            for x in 0..to_width {
                let (up, left) = (height - 1, width - 1);
                let [row, column] = match self.0 {
                    2 => [y, left - x],
                    3 => [up - y, left - x],
                    4 => [up - y, x],
                    5 => [x, y],
                    6 => [up - x, y],
                    7 => [up - x, left - y],
                    8 => [x, left - y],
                    _ => [y, x],
                };
                let at = (row * width + column) * CHANNELS;
                shown.extend_from_slice(&pixels[at..at + CHANNELS]);
            }
        }
        shown
    }
}

#[cfg(test)]
mod tests;
