//! Random numbers that are a function of a key and a counter, so that (seed, position) names one for ever: Philox4x32
//! with ten rounds, from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const KEY_STEPS: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// Four random words for a counter and a key.
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

/// The uniform number in [0, 1) that belongs to a seed and a position.
pub(super) fn uniform(seed: u64, position: u64) -> f64 {
    let words = philox([position as u32, (position >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = u64::from(words[0]) | u64::from(words[1]) << 32;
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        // From the paper's own test vectors.
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([!0; 4], [!0; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn numbers_lie_in_the_unit_interval_and_differ() {
        let mut seen: Vec<u64> = (0..1000)
            .flat_map(|i| [uniform(i, 0), uniform(0, i + 1), uniform(u64::MAX - i, 7)])
            .inspect(|x| assert!((0.0..1.0).contains(x)))
            .map(f64::to_bits)
            .collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 3000);
    }
}
