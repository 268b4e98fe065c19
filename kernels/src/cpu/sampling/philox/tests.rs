use super::*;

#[test]
fn known_answers() {
    // These test vectors are from the paper.
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
