use super::*;
use crate::HostMatrix;
use crate::cpu::memory::matrix::{Elements, Matrix};
use crate::cpu::simd::isa::testable;
use crate::cpu::testing::Random;

/// Returns the Euclidean norm.
fn norm_of(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| x * x).sum::<f64>().sqrt()
}

/// Asserts that `got` is at least `want`, and at most about one per cent larger.
#[track_caller]
fn assert_just_above(what: &str, got: f32, want: f64) {
    assert!(f64::from(got) >= want && f64::from(got) <= want * 1.01 + 1e-18, "{what}: {got} for {want}");
}

/// Returns random bfloat16 weights. Some are small or denormal, so that block floating point rounds them.
fn weights(random: &mut Random, count: usize) -> Vec<f32> {
    let mut weights = random.normals(count, 0.5);
    for (index, w) in weights.iter_mut().enumerate() {
        *w *= [1.0, 0.01, 1e-4, 1e-39][index % 7 % 4];
        *w = half::bf16::from_f32(*w).to_f32();
    }
    weights
}

#[test]
fn norms_of_weights_are_those_that_the_products_multiply() {
    let mut random = Random::new(71);
    for isa in testable("norms of a screen") {
        let path = Path::new(isa).unwrap();
        let mut pool = ThreadPool::new(2).unwrap();
        for (outputs, inputs) in [(16, 64), (37, 300), (5, 7)] {
            let weights = weights(&mut random, outputs * inputs);
            let bytes: Vec<u8> =
                weights.iter().flat_map(|w| half::bf16::from_f32(*w).to_le_bytes()).collect();
            let matrices = [HostMatrix::new(&bytes, WeightType::Bf16, outputs, inputs)];
            let source = FusedMatrices::new(&matrices, false).unwrap();
            let form = Form::of(WeightType::Bf16, path);
            let exact = Matrix::pack(form, &mut pool, source).unwrap();
            let screen = Screen::pack(path, &mut pool, source, form).unwrap().unwrap();
            let Weights::Int8(head) = screen.head() else { unreachable!() };
            for (panel, outputs_of) in (0..outputs).collect::<Vec<_>>().chunks(LANES).enumerate() {
                let mut largest = [0.0f64; 2];
                for &output in outputs_of {
                    let mut w = weights[output * inputs..][..inputs].to_vec();
                    if let Elements::BlockFloat(held) = &exact.data {
                        held.read_row(output, &mut w);
                    }
                    let mut v = vec![0.0; inputs];
                    head.read_row(path, output, &mut v);
                    let error = w.iter().zip(&v).map(|(w, v)| f64::from(*w) - f64::from(*v));
                    let norms = [norm_of(w.iter().map(|w| f64::from(*w))), norm_of(error)];
                    largest = [largest[0].max(norms[0]), largest[1].max(norms[1])];
                }
                let what = format!("{isa} {outputs}x{inputs}, panel {panel}");
                assert_just_above(&what, screen.weights[panel], largest[0]);
                assert_just_above(&what, screen.errors[panel], largest[1]);
            }
            let most = screen.weights.iter().fold(0.0, |most: f32, w| most.max(*w));
            assert!(screen.most > most, "{isa}: {} of weights of {most}", screen.most);
        }
    }
}

#[test]
fn a_head_with_a_weight_that_is_not_finite_has_no_screen() {
    for isa in testable("screens of infinite weights") {
        let path = Path::new(isa).unwrap();
        let mut pool = ThreadPool::new(2).unwrap();
        for (weight, finite) in [
            (f32::NAN, false),
            (f32::INFINITY, false),
            (f32::NEG_INFINITY, false),
            (3e38, false),
            (1e18, true),
        ] {
            let mut weights = vec![0.5f32; 37 * 130];
            weights[36 * 130 + 129] = weight;
            let bytes: Vec<u8> =
                weights.iter().flat_map(|w| half::bf16::from_f32(*w).to_le_bytes()).collect();
            let matrices = [HostMatrix::new(&bytes, WeightType::Bf16, 37, 130)];
            let source = FusedMatrices::new(&matrices, false).unwrap();
            let form = Form::of(WeightType::Bf16, path);
            let screen = Screen::pack(path, &mut pool, source, form).unwrap();
            assert_eq!(screen.is_some(), finite, "{isa}: {weight}");
        }
    }
}

#[test]
fn norms_of_a_row_are_those_that_the_products_multiply() {
    let mut random = Random::new(72);
    for isa in testable("norms of a row") {
        let path = Path::new(isa).unwrap();
        for inputs in [5, 128, 300] {
            let mut values = random.normals(2 * inputs, 1.0);
            values[inputs + inputs / 2] = 3e3;
            for row in 0..2 {
                let x = &values[row * inputs..][..inputs];
                for (layout, unit) in [(Layout::Plain, 0.0), (Layout::Pairs, 0.0), (Layout::BlockFloat, 13.0)]
                {
                    // In block floating point, the largest of 64 activations has thirteen bits.
                    let held: Vec<f64> = x
                        .chunks(BFP_BLOCK)
                        .flat_map(|block| {
                            let largest = block.iter().fold(0.0f64, |most, x| most.max(f64::from(x.abs())));
                            let unit = 2f64.powf(largest.log2().floor() + 1.0 - unit);
                            block.iter().map(move |&x| match layout {
                                Layout::BlockFloat => (f64::from(x) / unit).round_ties_even() * unit,
                                Layout::Plain => f64::from(x),
                                _ => half::bf16::from_f32(x).to_f64(),
                            })
                        })
                        .collect();
                    let quantised: Vec<f64> = x
                        .chunks(GROUP)
                        .flat_map(|group| {
                            let largest = group.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                            let number = move |x: f32| (x * (127.0 / largest)).round_ties_even();
                            group.iter().map(move |x| f64::from(number(*x)) * f64::from(largest / 127.0))
                        })
                        .collect();
                    let input = Input { values: &values, norm: None };
                    let norms = RowNorms::of(path, input, row, inputs, layout);
                    let what = format!("{isa} {inputs} {layout:?} {row}");
                    assert_just_above(&what, norms.exact, norm_of(held.iter().copied()));
                    assert_just_above(&what, norms.quantised, norm_of(quantised.iter().copied()));
                    let difference = norm_of(held.iter().zip(&quantised).map(|(x, q)| x - q));
                    assert_just_above(&what, norms.difference, difference);
                }
            }
        }
        for value in [f32::NAN, f32::INFINITY, 3e38] {
            let input = Input { values: &[1.0, value], norm: None };
            let norms = RowNorms::of(path, input, 0, 2, Layout::BlockFloat);
            assert!(!norms.exact.is_finite(), "{isa}: {value}: {norms:?}");
        }
    }
}
