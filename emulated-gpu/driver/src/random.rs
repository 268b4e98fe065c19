//! Seeded random choices.

/// SplitMix64 (Steele, Lea and Flood 2014): a generator with one word of state, good enough to draw orders.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a generator whose draws depend on the seed alone.
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// Returns a random index below `n`. `n` is at least 1.
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}
