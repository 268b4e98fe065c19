//! Pictures and recordings, with the limits of a small request.

use std::time::{Duration, Instant};

use tutti_media::{Budget, MediaError, Memory, decode_audio, decode_picture};

/// Memory of the budget, which holds for what decoders allocate too.
pub const MEMORY: usize = 64 << 20;
/// Maximum number of pixels and of samples.
const MOST: usize = 1 << 20;

/// Counts what is taken.
struct Counted(usize);

impl Memory for Counted {
    fn take(&mut self, bytes: usize) -> bool {
        let total = self.0.saturating_add(bytes);
        let fits = total <= MEMORY;
        self.0 = if fits { total } else { self.0 };
        fits
    }

    fn give(&mut self, bytes: usize) {
        self.0 = self.0.checked_sub(bytes).expect("no more is given back than was taken");
    }
}

fn decode<T>(decode: impl FnOnce(&mut Budget<'_>) -> Result<T, MediaError>) -> Option<(T, usize)> {
    let mut memory = Counted(0);
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut budget = Budget { memory: &mut memory, pixels: MOST as u64, samples: MOST, deadline };
    let decoded = decode(&mut budget);
    assert_ne!(decoded.as_ref().err(), Some(&MediaError::TooSlow));
    decoded.ok().map(|decoded| (decoded, memory.0))
}

/// Input: a file that is a picture.
pub fn picture(data: &[u8]) {
    let size = |own: [usize; 2]| Ok(own.map(|side| side.clamp(1, 64)));
    let decoded = decode(|budget| decode_picture(data, budget, size));
    if let Some((picture, taken)) = decoded {
        assert_eq!(picture.pixels.len(), picture.size[0] * picture.size[1] * 3);
        assert_eq!(picture.pixels.len(), taken);
    }
}

/// Input: a file that is a recording.
pub fn recording(data: &[u8]) {
    if let Some((samples, taken)) = decode(|budget| decode_audio(data, budget)) {
        assert!(!samples.is_empty() && samples.len() <= MOST);
        assert!(samples.iter().all(|sample| sample.is_finite()));
        assert_eq!(samples.len() * size_of::<f32>(), taken);
    }
}
