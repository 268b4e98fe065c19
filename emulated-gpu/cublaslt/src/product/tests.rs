use super::*;

/// Returns small integers. f32 represents their products and sums exactly.
fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7 + seed * 3) % 11) as f32 - 5.0).collect()
}

#[test]
fn products_of_lines_are_plain_sums_for_every_length() {
    for (m, n, k) in [(1, 1, 1), (3, 5, 15), (4, 2, 16), (5, 3, 17), (2, 7, 100), (130, 96, 96)] {
        let (a, b) = (numbers(m * k, 1), numbers(n * k, 2));
        let sums = multiply(&a, &b, k);
        for row in 0..m {
            for column in 0..n {
                let plain: f32 = (0..k).map(|i| a[row * k + i] * b[column * k + i]).sum();
                assert_eq!(sums[row * n + column], plain, "m {m}, n {n}, k {k}, at {row}, {column}");
            }
        }
    }
}

#[test]
fn tf32_keeps_ten_bits_and_rounds_ties_away_from_zero() {
    let ulp = f32::EPSILON * 8192.0;
    assert_eq!(tf32(1.0 + ulp), 1.0 + ulp);
    assert_eq!(tf32(1.0 + ulp / 2.0), 1.0 + ulp);
    assert_eq!(tf32(-1.0 - ulp / 2.0), -1.0 - ulp);
    assert_eq!(tf32(1.0 + ulp * 0.49), 1.0);
    assert!(tf32(f32::NAN).is_nan());
    assert_eq!(tf32(f32::INFINITY), f32::INFINITY);
}

#[test]
fn elements_round_to_nearest_even() {
    let stored = |kind, value| {
        let mut bytes = [0; 2];
        encode(kind, value, &mut bytes);
        u16::from_ne_bytes(bytes)
    };
    assert_eq!(stored(Kind::Bf16, 1.0 + 1.0 / 256.0), 0x3f80, "a tie goes to the even neighbour");
    assert_eq!(stored(Kind::Bf16, 1.0 + 3.0 / 256.0), 0x3f82);
    assert_eq!(stored(Kind::F16, 65_520.0), 0x7c00, "too large for f16 is infinite");
    let mut back = [0.0; 2];
    decode(Kind::F16, &[0x00, 0x3c, 0x00, 0xc0], &mut back);
    assert_eq!(back, [1.0, -2.0]);
}
