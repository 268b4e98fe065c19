use tutti_kernels::WeightType;

use super::{
    QuantiserScheme,
    codes::{Codes, quantise},
};

const INT4: QuantiserScheme = QuantiserScheme::Int4 { group: 32 };

fn bytes(weights: &[f32]) -> Vec<u8> {
    weights.iter().flat_map(|weight| weight.to_le_bytes()).collect()
}

fn codes(scheme: QuantiserScheme, weights: &[f32], columns: usize) -> Codes {
    quantise(scheme, &bytes(weights), WeightType::F32, columns).unwrap_or_else(|row| panic!("row {row}"))
}

fn scale(codes: &Codes, index: usize) -> f32 {
    f32::from_le_bytes(codes.scales[index * 4..][..4].try_into().unwrap_or_default())
}

#[test]
fn weights_that_codes_stand_for_exactly_have_no_error() {
    let weights: Vec<f32> = (0..32).map(|at| 0.25 * ((at % 16) as f32 - 8.0)).collect();
    let four = codes(INT4, &weights, 32);
    assert_eq!(scale(&four, 0), 0.25);
    // The first code is in the lowest bits.
    assert_eq!(four.codes[..3], [0x10, 0x32, 0x54]);
    assert_eq!(four.error.relative(), 0.0);

    let eight = codes(QuantiserScheme::Int8, &[-127.0, 0.0, 1.0, 127.0], 4);
    assert_eq!((scale(&eight, 0), &eight.codes[..]), (1.0, &[129, 0, 1, 127][..]));
    let floats = codes(QuantiserScheme::Fp8, &[448.0, -1.75, 0.0, 2f32.powi(-9)], 4);
    assert_eq!((scale(&floats, 0), &floats.codes[..]), (1.0, &[0x7e, 0xbe, 0, 1][..]));
}

#[test]
fn rows_of_zeros_and_of_extreme_numbers_stay_finite() {
    let extremes = [0.0, f32::MIN_POSITIVE / 4.0, 1e-30, 1e30, f32::MAX];
    for scheme in [INT4, QuantiserScheme::Int8, QuantiserScheme::Fp8] {
        for dtype in [WeightType::F32, WeightType::Bf16, WeightType::F16] {
            for extreme in extremes {
                let held: Vec<u8> = [extreme; 32]
                    .iter()
                    .flat_map(|&x| match dtype {
                        WeightType::F32 => x.to_le_bytes().to_vec(),
                        WeightType::Bf16 => half::bf16::from_f32_const(x.min(3e38)).to_le_bytes().to_vec(),
                        WeightType::F16 => half::f16::from_f32_const(x.min(6e4)).to_le_bytes().to_vec(),
                    })
                    .collect();
                let codes = quantise(scheme, &held, dtype, 32).unwrap_or_else(|row| panic!("row {row}"));
                assert!(
                    codes.error.relative() <= 1.0 + 1e-9,
                    "{scheme:?} {dtype:?} {extreme}: {:?}",
                    codes.error
                );
            }
        }
    }
}

#[test]
fn a_row_with_a_number_that_is_not_finite_is_named() {
    let mut weights = vec![1.0; 64 * 32];
    weights[40 * 32 + 3] = f32::NAN;
    assert_eq!(quantise(INT4, &bytes(&weights), WeightType::F32, 32).err(), Some(40));
}

#[test]
fn a_scale_chosen_by_error_is_better_than_that_of_the_largest_weight() {
    // A weight far larger than the others.
    let mut weights: Vec<f32> = (0..32).map(|at| (at as f32 - 15.5) / 16.0).collect();
    weights[5] = 1.3;
    let chosen = codes(INT4, &weights, 32);
    let (largest, mut squares, mut sum) = (1.3f32 / 7.0, 0f64, 0f64);
    for &weight in &weights {
        squares += f64::from(weight - (weight / largest).round() * largest).powi(2);
        sum += f64::from(weight).powi(2);
    }
    assert!(chosen.error.relative() < (squares / sum).sqrt());
}
