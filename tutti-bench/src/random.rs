//! Random numbers that depend only on a seed.

/// The splitmix64 sequence (Steele, Lea and Flood, 2014).
#[derive(Clone, Debug)]
pub struct Draw(u64);

impl Draw {
    /// Starts a sequence.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Starts the sequence with the number `index` of a seed. Sequences with different numbers are independent.
    pub fn numbered(seed: u64, index: u64) -> Self {
        let mut outer = Self(seed ^ index.wrapping_mul(0xd134_2543_de82_ef95));
        Self(outer.word())
    }

    /// Returns 64 random bits.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns an integer below `limit`.
    pub fn below(&mut self, limit: u32) -> u32 {
        (self.unit() * f64::from(limit)) as u32
    }

    /// Returns a number of the exponential distribution with mean 1.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }

    /// Returns a number of the standard normal distribution (Box and Muller, 1958).
    pub fn normal(&mut self) -> f64 {
        let radius = (2.0 * self.exponential()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }
}
