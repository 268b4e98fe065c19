//! Helpers that the unit tests of several operations share.

use super::memory::Planes;
use crate::PlanesShape;

/// Planes without pages and without slots, which allow any step.
#[allow(clippy::unwrap_used)] // Nothing is allocated.
pub(super) fn no_planes() -> Planes {
    Planes::zeroed(&PlanesShape::default()).unwrap()
}

/// A pseudo-random generator with a fixed sequence per seed.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub(super) fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Approximately normal numbers: sums of twelve uniform numbers.
    pub(super) fn normals(&mut self, count: usize, deviation: f32) -> Vec<f32> {
        (0..count).map(|_| ((0..12).map(|_| self.uniform()).sum::<f32>() - 6.0) * deviation).collect()
    }
}
