//! Random numbers as a function of (seed, position): Philox4x32 with ten rounds, from Salmon et al., "Parallel random
//! numbers: as easy as 1, 2, 3" (SC 2011).

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const KEY_STEPS: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// Returns the four random words of a counter and a key.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let even = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let odd = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            (odd >> 32) as u32 ^ counter[1] ^ key[0],
            odd as u32,
            (even >> 32) as u32 ^ counter[3] ^ key[1],
            even as u32,
        ];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    counter
}

/// Returns a uniform random number in [0, 1), which depends only on the seed and the position.
pub(in crate::cpu) fn uniform(seed: u64, position: u64) -> f64 {
    let words = philox([position as u32, (position >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = u64::from(words[0]) | u64::from(words[1]) << 32;
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests;
