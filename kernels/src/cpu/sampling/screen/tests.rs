use super::*;
use crate::cpu::CpuDevice;
use crate::cpu::memory::Weights;
use crate::cpu::simd::isa::testable;
use crate::cpu::testing::Random;
use crate::{Dense, Device, HostMatrix, Linear, Quantize, WeightType};

/// Number of operations that are skipped before the next one is admitted.
fn skipped(backoff: &mut Backoff) -> usize {
    (0..).take_while(|_| !backoff.admits()).count()
}

#[test]
fn failures_skip_more_and_more_and_a_success_starts_anew() {
    let mut backoff = Backoff::default();
    assert_eq!(skipped(&mut backoff), 0);
    for wanted in [8, 16, 32, 64, 128, 256, 512, 1024, 1024] {
        backoff.failed();
        assert_eq!(skipped(&mut backoff), wanted);
    }
    backoff.succeeded();
    assert_eq!(skipped(&mut backoff), 0);
    backoff.failed();
    assert_eq!(skipped(&mut backoff), 8);
}

#[test]
fn candidates_are_ordered_by_panel_and_end_after_the_limit() {
    // Two rows of 33 panels.
    let marks = [1 << 15, 0b101, 1, 1 << 15, 0, 0];
    let pair = |panel, row| Candidate { panel, row };
    let all = [pair(15, 0), pair(15, 1), pair(16, 0), pair(18, 0), pair(32, 0)];
    let mut candidates = vec![pair(9, 9)];
    collect(&marks, 3, 5, &mut candidates);
    assert_eq!(candidates, all);
    collect(&marks, 3, 2, &mut candidates);
    assert_eq!(candidates.len(), 3);
}

#[test]
fn a_row_without_a_finite_bound_is_not_sound() {
    let sound =
        |exact, most| RowBound::new(RowNorms { exact, quantised: 1.0, difference: 0.0 }, 128, most).sound;
    assert!(sound(1.0, 1.0) && sound(9e18, 1e18));
    assert!(!sound(f32::NAN, 1.0) && !sound(f32::INFINITY, 1.0) && !sound(1.1e19, 1e18));
}

/// Difference of the head's logits from the sums of its screen, and the bounds, of rows with outliers, small numbers,
/// and a few numbers that quantise without an error.
#[test]
fn logits_differ_from_the_sums_of_a_screen_by_less_than_the_bound() {
    let mut random = Random::new(73);
    for isa in testable("bounds of a screen") {
        let mut device = CpuDevice::new(2, isa).unwrap();
        let path = Path::new(isa).unwrap();
        for dtype in [WeightType::F32, WeightType::F16, WeightType::Bf16] {
            for inputs in [1, 40, 128, 1030] {
                let weights = random.normals(70 * inputs, 0.3);
                let bytes: Vec<u8> = weights
                    .iter()
                    .flat_map(|&w| match dtype {
                        WeightType::F32 => w.to_le_bytes().to_vec(),
                        WeightType::F16 => half::f16::from_f32(w).to_le_bytes().to_vec(),
                        WeightType::Bf16 => half::bf16::from_f32(w).to_le_bytes().to_vec(),
                    })
                    .collect();
                let source = HostMatrix::new(&bytes, dtype, 70, inputs);
                let head = device.head_matrix(&[source], Quantize::None).unwrap();
                let Weights::Stored(matrix) = &head else { unreachable!() };
                let screen = matrix.screen.as_ref().unwrap();
                let mut values = random.normals(4 * inputs, 1.0);
                values[inputs] = 200.0;
                values[2 * inputs..3 * inputs].iter_mut().for_each(|x| *x *= 1e-20);
                values[3 * inputs..].iter_mut().for_each(|x| *x = x.signum());
                let mut x = device.tensor(4, inputs).unwrap();
                x.fill(&values).unwrap();
                let mut products = [(), ()].map(|()| device.tensor(4, 70).unwrap());
                device.linear(Linear::plain(&x, &head), &mut products[0]).unwrap();
                device.linear(Linear::plain(&x, screen.head()), &mut products[1]).unwrap();
                for row in 0..4 {
                    let input = Input { values: &values, norm: None };
                    let norms = RowNorms::of(path, input, row, inputs, Layout::of(&matrix.data));
                    let bound = RowBound::new(norms, inputs, screen.most);
                    assert!(bound.sound);
                    for output in 0..70 {
                        let [logit, sum] = [0, 1].map(|i| f64::from(products[i].values()[row * 70 + output]));
                        let panel = output / LANES;
                        let b = bound.weights * screen.weights[panel] + bound.errors * screen.errors[panel];
                        let what = format!("{isa} {dtype:?} {inputs}, row {row}, output {output}");
                        let (off, b) = ((logit - sum).abs(), f64::from(b + TINY));
                        assert!(off <= b, "{what}: {logit} and {sum}, bound {b}");
                        let size = f64::from(norms.exact * screen.weights[panel]);
                        assert!(b <= 0.1 * size + 1e-17, "{what}: bound {b} of {size}");
                    }
                }
            }
        }
    }
}
