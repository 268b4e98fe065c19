//! Tests that an LM head with a screen (an int8 copy that excludes most panels) has the same arg max as without: token,
//! ties and errors.

use tutti_kernels::cpu::{CpuDevice, Isa, ScreenCounts, Vector, Weights};
use tutti_kernels::{
    Argmax, Dense, Device, DeviceError, HostMatrix, Linear, Norm, Quantize, SampleRow, Sampled, Sampler,
    SamplingParams, TokenMask, WeightType,
};

use crate::support::{Random, bits, bytes, results, stored, tensor};

const TYPES: [WeightType; 3] = [WeightType::F32, WeightType::F16, WeightType::Bf16];
static GREEDY: SamplingParams = SamplingParams::GREEDY;

/// A device on every instruction path that this machine supports, with one to three threads.
fn devices() -> impl Iterator<Item = (String, CpuDevice)> {
    let devices = Isa::ALL.into_iter().filter(|isa| isa.available());
    devices.flat_map(|isa| {
        (1..=3).map(move |threads| {
            (format!("{isa} with {threads} threads"), CpuDevice::new(threads, isa).unwrap())
        })
    })
}

/// An LM head with a screen, and without one.
struct Heads {
    screened: Weights,
    plain: Weights,
    outputs: usize,
    inputs: usize,
}

impl Heads {
    fn new(device: &mut CpuDevice, dtype: WeightType, inputs: usize, weights: &[f32]) -> Self {
        let (bytes, outputs) = (bytes(dtype, weights), weights.len() / inputs);
        let source = [HostMatrix::new(&bytes, dtype, outputs, inputs)];
        let screened = device.head_matrix(&source, Quantize::None).unwrap();
        let plain = device.matrix(&source, Quantize::None).unwrap();
        Self { screened, plain, outputs, inputs }
    }

    fn panels(&self) -> u64 {
        self.outputs.div_ceil(16) as u64
    }
}

/// Asserts that the arg max of rows is the same with a screen, without one and by sampling, and that a shard of a head
/// finds the same candidates. Returns the arg max, and the use of the screen.
#[track_caller]
fn check(
    device: &mut CpuDevice,
    what: &str,
    heads: &Heads,
    values: &[f32],
    norm: Option<&Vector>,
) -> (Vec<Result<Sampled, DeviceError>>, ScreenCounts) {
    let rows = values.len() / heads.inputs;
    let x = tensor(device, heads.inputs, values);
    let norm = || norm.map(|weight| Norm { weight, eps: 1e-6 });
    let mut logits = device.tensor(rows, heads.outputs).unwrap();
    device.linear(Linear { norm: norm(), ..Linear::plain(&x, &heads.plain) }, &mut logits).unwrap();
    let greedy = SampleRow {
        params: &GREEDY,
        prompt: &[],
        output: &[],
        forbidden: &[],
        allowed: None,
        position: 0,
        logprobs: None,
    };
    device.sample(&logits, &(0..rows).map(|row| (row, greedy)).collect::<Vec<_>>()).unwrap();
    let before = device.screen_counts();
    for weight in [&heads.plain, &heads.screened] {
        device.argmax(Argmax { x: &x, norm: norm(), weight, logits: &mut logits, allowed: &[] }).unwrap();
    }
    let after = device.screen_counts();
    let sampled = results(device).sampled;
    let [by_sampling, plain, screened] = [0, 1, 2].map(|i| &sampled[i * rows..][..rows]);
    assert_eq!(plain, screened, "{what}");
    let tokens = |sampled: &[Result<Sampled, _>]| -> Vec<_> {
        sampled.iter().map(|row| row.as_ref().ok().map(|row| row.token)).collect()
    };
    assert_eq!(tokens(by_sampling), tokens(screened), "{what}");
    let candidates = [&heads.plain, &heads.screened].map(|weight| {
        let mut out = device.tensor(rows, 2).unwrap();
        let argmax = Argmax { x: &x, norm: norm(), weight, logits: &mut logits, allowed: &[] };
        device.partial_argmax(argmax, 1000, &mut out).unwrap();
        out.values().to_vec()
    });
    for (plain, screened) in candidates[0].chunks(2).zip(candidates[1].chunks(2)) {
        let nan = plain[0].is_nan() && screened[0].is_nan();
        assert!(nan || bits(plain) == bits(screened), "{what}: {plain:?} and {screened:?}");
    }
    let counts = ScreenCounts {
        screened: after.screened - before.screened,
        pairs: after.pairs - before.pairs,
        failed: after.failed - before.failed,
        listed: after.listed - before.listed,
    };
    (screened.to_vec(), counts)
}

/// Makes a token likely for each row: its weights point in the row's direction. `scale` is the norm's weight.
fn make_likely(weights: &mut [f32], inputs: usize, values: &[f32], scale: &[f32]) -> Vec<u32> {
    let outputs = weights.len() / inputs;
    let rows = values.chunks(inputs).enumerate();
    rows.map(|(row, values)| {
        let token = (row * 97 + outputs - 1) % outputs;
        let direction: Vec<f32> = values.iter().zip(scale).map(|(x, scale)| x * scale).collect();
        let norm = direction.iter().map(|x| x * x).sum::<f32>().sqrt();
        // The other tokens' weights have a standard deviation of 0.5, so the factor gives all tokens similar norms.
        let factor = 0.5 * (inputs as f32).sqrt() / norm;
        let weights = weights[token * inputs..][..inputs].iter_mut().zip(&direction);
        weights.for_each(|(weight, x)| *weight = x * factor);
        token as u32
    })
    .collect()
}

#[test]
fn a_likely_token_is_found_with_few_panels() {
    let mut random = Random::new(51);
    for (inputs, outputs, normed) in
        [(40, 1003, true), (128, 533, false), (1024, 530, true), (2500, 530, false), (4096, 275, true)]
    {
        let values = random.normals(20 * inputs, 1.0);
        let scale: Vec<f32> = (0..inputs).map(|_| 0.5 + random.below(1000) as f32 / 1000.0).collect();
        let mut weights = random.normals(outputs * inputs, 0.5);
        let ones = vec![1.0; inputs];
        let tokens = make_likely(&mut weights, inputs, &values, if normed { &scale } else { &ones });
        for (name, mut device) in devices() {
            for dtype in TYPES {
                let heads = Heads::new(&mut device, dtype, inputs, &weights);
                let norm = normed.then(|| device.vector(&scale).unwrap());
                for rows in [1, 2, 3, 7, 16, 20] {
                    let what = format!("{name} {dtype:?} {rows}x{inputs}x{outputs}");
                    let values = &values[..rows * inputs];
                    let (sampled, counts) = check(&mut device, &what, &heads, values, norm.as_ref());
                    let sampled: Vec<_> = sampled.iter().map(|row| row.as_ref().unwrap().token).collect();
                    assert_eq!(sampled, tokens[..rows], "{what}");
                    assert_eq!((counts.screened, counts.failed), (1, 0), "{what}");
                    // Each row computes at least the panel of its token, and few others.
                    let rows = rows as u64;
                    let most = 2 * rows + heads.panels() / 8;
                    assert!((rows..=most).contains(&counts.pairs), "{what}: {counts:?}");
                }
            }
        }
    }
}

#[test]
fn random_logits_have_the_same_likeliest_token() {
    let mut random = Random::new(52);
    for (inputs, outputs) in [(1, 7), (40, 1003), (130, 16), (1024, 300)] {
        let weights = random.normals(outputs * inputs, 0.5);
        for (name, mut device) in devices() {
            for dtype in TYPES {
                let heads = Heads::new(&mut device, dtype, inputs, &weights);
                for rows in 1..=20 {
                    let values = random.normals(rows * inputs, 1.0);
                    let what = format!("{name} {dtype:?} {rows}x{inputs}x{outputs}");
                    check(&mut device, &what, &heads, &values, None);
                }
            }
        }
    }
}

/// The logits of some tokens are equal except for rounding, and quantisation adds a different error to each. The
/// activations have one magnitude, so they quantise without an error. All other tokens are far less likely.
#[test]
fn errors_of_weights_decide_nothing() {
    let mut random = Random::new(53);
    for inputs in [40, 128, 300] {
        let signs: Vec<f32> = (0..inputs).map(|_| if random.below(2) == 0 { 1.0 } else { -1.0 }).collect();
        for (rows, ties, outputs) in [(1, 40, 3203), (3, 14, 3203), (20, 3, 3203), (2, 530, 530)] {
            let mut weights = random.normals(outputs * inputs, 0.02);
            for tie in 0..ties {
                let token = tie * (outputs / ties) + random.below(outputs / ties);
                for (input, pair) in weights[token * inputs..][..inputs].chunks_mut(2).enumerate() {
                    // The noise of a pair of inputs cancels out in the logit.
                    let noise = random.normals(1, 0.02)[0];
                    pair[0] = signs[2 * input] * (0.5 + noise);
                    pair[1] = signs[2 * input + 1] * (0.5 - noise);
                }
            }
            let values: Vec<f32> =
                (1..=rows).flat_map(|row| signs.iter().map(move |sign| sign * row as f32)).collect();
            for (name, mut device) in devices() {
                for dtype in TYPES {
                    let heads = Heads::new(&mut device, dtype, inputs, &weights);
                    let what = format!("{name} {dtype:?} {rows}x{inputs}x{outputs}");
                    let (_, counts) = check(&mut device, &what, &heads, &values, None);
                    if ties < 100 {
                        assert!(counts.screened == 1 && counts.pairs >= rows as u64, "{what}: {counts:?}");
                    }
                }
            }
        }
    }
}

/// The logits of some tokens are equal. Their weights quantise without an error, but quantisation of the activations
/// adds a different error to each. All other tokens are far less likely.
#[test]
fn errors_of_activations_decide_nothing() {
    let mut random = Random::new(63);
    let (triples, outputs) = (8, 3203);
    let inputs = 3 * triples;
    // In each triple, the third activation is the sum of the others, and the weights below cancel it out. The numbers
    // have so few bits that no type rounds them.
    let triple = |random: &mut Random| {
        let [a, b] = [(); 2].map(|()| (1 + random.below(50)) as f32 / 64.0);
        [a, b, a + b]
    };
    let row: Vec<f32> = (0..triples).flat_map(|_| triple(&mut random)).collect();
    for (rows, ties) in [(1, 40), (3, 14)] {
        let mut weights = vec![-0.5; outputs * inputs];
        let mut lowest = outputs;
        for tie in 0..ties {
            let token = tie * (outputs / ties) + random.below(outputs / ties);
            lowest = lowest.min(token);
            for triple in weights[token * inputs..][..inputs].chunks_mut(3) {
                let sign = if random.below(2) == 0 { 0.5 } else { -0.5 };
                triple.copy_from_slice(&[sign, sign, -sign]);
            }
        }
        let values: Vec<f32> =
            (1..=rows).flat_map(|scale| row.iter().map(move |x| x * scale as f32)).collect();
        for (name, mut device) in devices() {
            for dtype in TYPES {
                let heads = Heads::new(&mut device, dtype, inputs, &weights);
                let what = format!("{name} {dtype:?} {rows} rows");
                let (sampled, counts) = check(&mut device, &what, &heads, &values, None);
                assert!(sampled.iter().flatten().all(|row| row.token as usize == lowest), "{what}");
                assert_eq!(counts.screened, 1, "{what}: {counts:?}");
            }
        }
    }
}

/// The weights of some tokens differ in one element each, by one unit in the last place.
#[test]
fn rows_that_differ_by_one_rounding_step_are_told_apart() {
    let mut random = Random::new(54);
    let (inputs, outputs) = (128, 3203);
    let values = random.normals(2 * inputs, 1.0);
    for (name, mut device) in devices() {
        for dtype in TYPES {
            let mut weights = random.normals(outputs * inputs, 0.02);
            for token in (5..outputs).step_by(311) {
                let kind = &mut weights[token * inputs..][..inputs];
                kind.iter_mut().zip(&values).for_each(|(weight, x)| *weight = stored(dtype, 0.5 * x));
                let (at, x) = (random.below(inputs), random.below(2));
                let ulp = match dtype {
                    WeightType::F32 => f32::EPSILON,
                    WeightType::F16 => 1.0 / 1024.0,
                    WeightType::Bf16 => 1.0 / 128.0,
                };
                kind[at] *= if x == 0 { 1.0 + ulp } else { 1.0 - ulp };
            }
            let heads = Heads::new(&mut device, dtype, inputs, &weights);
            let (_, counts) = check(&mut device, &format!("{name} {dtype:?}"), &heads, &values, None);
            assert_eq!(counts.screened, 1, "{name} {dtype:?}: {counts:?}");
        }
    }
}

#[test]
fn of_equal_rows_the_lowest_token_wins() {
    let mut random = Random::new(55);
    let (inputs, outputs) = (128, 3203);
    let mut weights = random.normals(outputs * inputs, 0.1);
    let values = random.normals(2 * inputs, 1.0);
    // Tokens with equal weights. The tokens of the first row are at both ends of a panel and in another panel. The
    // tokens of the second row are in the last panel and in an earlier one.
    for (row, tokens) in [vec![47, 33, 1600, 32], vec![3202, 2000, 3201]].iter().enumerate() {
        for token in tokens {
            weights[token * inputs..][..inputs].copy_from_slice(&values[row * inputs..][..inputs]);
        }
    }
    for (name, mut device) in devices() {
        for dtype in TYPES {
            let heads = Heads::new(&mut device, dtype, inputs, &weights);
            let (sampled, counts) = check(&mut device, &format!("{name} {dtype:?}"), &heads, &values, None);
            let tokens: Vec<_> = sampled.into_iter().map(|row| row.unwrap().token).collect();
            assert_eq!(tokens, [32, 2000], "{name} {dtype:?}");
            assert_eq!((counts.screened, counts.pairs), (1, 4), "{name}: two panels per row");
        }
    }
}

/// The zeros that pad the last panel are larger than all logits.
#[test]
fn padding_of_the_last_panel_is_no_token() {
    let mut random = Random::new(56);
    let inputs = 128;
    for outputs in [3201, 3207] {
        let mut weights: Vec<f32> =
            random.normals(outputs * inputs, 0.1).iter().map(|w| -w.abs() - 1.0).collect();
        weights[700 * inputs..][..inputs].fill(-0.5);
        weights[1400 * inputs..][..inputs].fill(-0.5);
        for (name, mut device) in devices() {
            for dtype in TYPES {
                let heads = Heads::new(&mut device, dtype, inputs, &weights);
                for rows in [1, 5] {
                    let values = vec![1.0; rows * inputs];
                    let what = format!("{name} {dtype:?} {rows}x{outputs}");
                    let (sampled, counts) = check(&mut device, &what, &heads, &values, None);
                    assert!(sampled.iter().flatten().all(|sampled| sampled.token == 700), "{what}");
                    assert_eq!((counts.screened, counts.pairs), (1, 2 * rows as u64), "{what}");
                }
            }
        }
    }
}

/// An activation that is far larger than the others leaves few bits to the others, so the screen's error bound is wide.
#[test]
fn outliers_change_no_token() {
    let mut random = Random::new(57);
    let (inputs, outputs) = (1024, 1003);
    let weights = random.normals(outputs * inputs, 0.1);
    for (name, mut device) in devices() {
        for dtype in TYPES {
            let heads = Heads::new(&mut device, dtype, inputs, &weights);
            for outlier in [30.0, 1e3, 1e6, 1e15] {
                let mut values = random.normals(3 * inputs, 1.0);
                values[700] = outlier;
                values[inputs + 3] = -outlier;
                check(&mut device, &format!("{name} {dtype:?} {outlier}"), &heads, &values, None);
            }
        }
    }
}

/// If all rows of a head are equal, all panels are candidates, and the screen excludes none. The screen is then
/// skipped: for 8 operations after the first failure, for 16 after the second.
#[test]
fn too_many_candidates_compute_all_logits() {
    let mut random = Random::new(58);
    let (inputs, outputs) = (128, 1003);
    let weights = random.normals(inputs, 0.5).repeat(outputs);
    let values = random.normals(3 * inputs, 1.0);
    for (name, mut device) in devices() {
        let heads = Heads::new(&mut device, WeightType::Bf16, inputs, &weights);
        let x = tensor(&mut device, inputs, &values);
        let mut logits = device.tensor(3, outputs).unwrap();
        for operation in 1..=27 {
            let weight = &heads.screened;
            device.argmax(Argmax { x: &x, norm: None, weight, logits: &mut logits, allowed: &[] }).unwrap();
            let failed = [1, 10, 27].iter().filter(|&&failure| failure <= operation).count() as u64;
            let wanted = ScreenCounts { failed, ..ScreenCounts::default() };
            assert_eq!(device.screen_counts(), wanted, "{name}, operation {operation}");
        }
        let sampled = results(&mut device).sampled;
        assert!(sampled.iter().all(|row| row.as_ref().is_ok_and(|row| row.token == 0)), "{name}");
    }
}

#[test]
fn a_row_that_is_not_finite_has_an_error_of_its_own() {
    let mut random = Random::new(59);
    let (inputs, outputs) = (40, 1003);
    let sound = random.normals(3 * inputs, 1.0);
    let mut weights = random.normals(outputs * inputs, 0.5);
    let tokens = make_likely(&mut weights, inputs, &sound, &vec![1.0; inputs]);
    for (name, mut device) in devices() {
        for dtype in TYPES {
            let heads = Heads::new(&mut device, dtype, inputs, &weights);
            for garbage in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38] {
                let mut values = sound.clone();
                values[inputs + 7] = garbage;
                let what = format!("{name} {dtype:?} {garbage}");
                let (sampled, counts) = check(&mut device, &what, &heads, &values, None);
                assert_eq!((counts.screened, counts.failed), (0, 0), "{what}");
                for row in [0, 2] {
                    assert_eq!(sampled[row].as_ref().map(|row| row.token), Ok(tokens[row]), "{what}");
                }
                assert!(sampled[1].is_err() || garbage.is_finite(), "{what}: {:?}", sampled[1]);
            }
            // Rows that fail do not make the next operation skip its screen.
            assert_eq!(check(&mut device, &name, &heads, &sound, None).1.screened, 1, "{name} {dtype:?}");
        }
    }
}

#[test]
fn denormal_and_huge_numbers_change_no_token() {
    let mut random = Random::new(60);
    let (inputs, outputs) = (128, 1003);
    let (weights, values) = (random.normals(outputs * inputs, 1.0), random.normals(2 * inputs, 1.0));
    for (name, mut device) in devices() {
        for dtype in [WeightType::F32, WeightType::Bf16] {
            for of_weights in [1e-42, 1e-38, 1e-25, 1.0, 1e17] {
                let weights: Vec<f32> = weights.iter().map(|w| w * of_weights).collect();
                let heads = Heads::new(&mut device, dtype, inputs, &weights);
                for of_values in [1e-42, 1e-35, 1e-18, 1.0, 1e17, 1e20] {
                    let values: Vec<f32> = values.iter().map(|x| x * of_values).collect();
                    let what = format!("{name} {dtype:?} {of_weights} {of_values}");
                    check(&mut device, &what, &heads, &values, None);
                }
            }
        }
    }
}

/// The masks of a test of 1,003 tokens, whose 63 panels allow a row's mask to name 15.
fn masks() -> [Option<TokenMask>; 8] {
    let of = |tokens: &[u32]| Some(TokenMask::of_tokens(TokenMask::words_of(1003), tokens.iter().copied()));
    let odd: Vec<u32> = (0..1003).filter(|token| token % 2 == 1).collect();
    [
        None,
        of(&[1002]),
        of(&[3, 5, 15, 16, 500]),
        of(&[]),
        // Every second token, of every panel.
        of(&odd),
        // One token of each of 15 panels, and of 16 panels.
        of(&(0..15).map(|panel| 16 * panel + panel).collect::<Vec<_>>()),
        of(&(0..16).map(|panel| 64 * panel - panel.min(6)).collect::<Vec<_>>()),
        // Tokens of one panel, which is the last and is not whole.
        of(&(992..1003).collect::<Vec<_>>()),
    ]
}

/// Asserts that the arg max of masked rows is what sampling takes. Returns the use of the screen by the head with one.
#[track_caller]
fn check_masked(
    device: &mut CpuDevice,
    what: &str,
    heads: &[&Weights],
    values: &[f32],
    masks: &[Option<&TokenMask>],
) -> Vec<ScreenCounts> {
    let x = tensor(device, values.len() / masks.len(), values);
    let mut logits = device.tensor(masks.len(), 1003).unwrap();
    let greedy = |allowed| SampleRow {
        params: &GREEDY,
        prompt: &[],
        output: &[],
        forbidden: &[],
        allowed,
        position: 0,
        logprobs: None,
    };
    let rows: Vec<_> = masks.iter().map(|mask| greedy(*mask)).enumerate().collect();
    let counts = heads.iter().enumerate().map(|(head, weight)| {
        device.linear(Linear::plain(&x, weight), &mut logits).unwrap();
        device.sample(&logits, &rows).unwrap();
        let before = device.screen_counts();
        device.argmax(Argmax { x: &x, norm: None, weight, logits: &mut logits, allowed: masks }).unwrap();
        let after = device.screen_counts();
        let sampled = results(device).sampled;
        assert_eq!(sampled[masks.len()..], sampled[..masks.len()], "{what}, head {head}");
        ScreenCounts {
            screened: after.screened - before.screened,
            pairs: after.pairs - before.pairs,
            failed: after.failed - before.failed,
            listed: after.listed - before.listed,
        }
    });
    counts.collect()
}

#[test]
fn masked_rows_take_what_sampling_takes() {
    let mut random = Random::new(67);
    let (inputs, outputs) = (40, 1003);
    let mut weights = random.normals(outputs * inputs, 0.5);
    // Equal tokens in one panel, and in two.
    for (token, twin) in [(3, 5), (15, 16), (500, 3)] {
        weights.copy_within(twin * inputs..(twin + 1) * inputs, token * inputs);
    }
    let values = random.normals(20 * inputs, 1.0);
    // The likeliest token of row 0 is token 500, which some masks allow.
    for (weight, x) in weights[500 * inputs..][..inputs].iter_mut().zip(&values) {
        *weight = 2.0 * x;
    }
    let masks = masks();
    for (name, mut device) in devices() {
        for dtype in TYPES {
            let heads = Heads::new(&mut device, dtype, inputs, &weights);
            let bytes = bytes(dtype, &weights);
            let source = [HostMatrix::new(&bytes, dtype, outputs, inputs)];
            let int8 = device.matrix(&source, Quantize::Int8).unwrap();
            let all = [&heads.screened, &heads.plain, &int8];
            for (kind, mask) in masks.iter().enumerate() {
                for rows in [1, 3, 17] {
                    let masks = vec![mask.as_ref(); rows];
                    let what = format!("{name} {dtype:?}, {rows} rows of mask {kind}");
                    let counts = check_masked(&mut device, &what, &all, &values[..rows * inputs], &masks);
                    let listed = if [1, 2, 3, 5, 7].contains(&kind) { rows as u64 } else { 0 };
                    assert_eq!(
                        counts.iter().map(|of| of.listed).collect::<Vec<_>>(),
                        [listed, listed, 0],
                        "{what}"
                    );
                    // Rows that name their panels multiply these and no screen.
                    let panels = [0, 1, 3, 0, 0, 15, 0, 1][kind];
                    assert!(listed == 0 || counts[0].pairs == panels * listed, "{what}: {counts:?}");
                    assert!(listed == 0 || counts[0].screened + counts[0].failed == 0, "{what}: {counts:?}");
                }
            }
            // All kinds beside one another, from each first.
            for first in 0..masks.len() {
                let masks: Vec<_> = (first..first + 20).map(|i| masks[i % 8].as_ref()).collect();
                let what = format!("{name} {dtype:?}, all masks from {first} on");
                let counts = check_masked(&mut device, &what, &all, &values, &masks);
                assert!(counts[0].listed == 0 || counts[0].screened == 1, "{what}: {counts:?}");
            }
        }
    }
}

/// The screen's largest sums are those of forbidden tokens.
#[test]
fn forbidden_tokens_hide_no_panel() {
    let mut random = Random::new(68);
    let (inputs, outputs) = (128, 1003);
    let values = random.normals(2 * inputs, 1.0);
    let mut weights = random.normals(outputs * inputs, 0.1);
    // Token 700 is the likeliest of both rows but for token 40, which is forbidden.
    let sums: Vec<f32> = (0..inputs).map(|i| values[i] + values[inputs + i]).collect();
    for (token, scale) in [(40, 1.0), (700, 0.6)] {
        for (weight, sum) in weights[token * inputs..][..inputs].iter_mut().zip(&sums) {
            *weight = scale * sum;
        }
    }
    let others = (0..1003).filter(|token| *token != 40);
    let mask = TokenMask::of_tokens(TokenMask::words_of(1003), others);
    for (name, mut device) in devices() {
        for dtype in TYPES {
            let heads = Heads::new(&mut device, dtype, inputs, &weights);
            let masks = [Some(&mask), None];
            let counts = check_masked(&mut device, &name, &[&heads.screened], &values, &masks);
            assert_eq!((counts[0].screened, counts[0].listed), (1, 0), "{name} {dtype:?}");
            assert!(counts[0].pairs < 8, "{name} {dtype:?}: {counts:?}");
        }
    }
}

#[test]
fn masks_of_another_size_are_refused() {
    let (name, mut device) = devices().next().unwrap();
    let heads = Heads::new(&mut device, WeightType::F32, 4, &[0.5; 4 * 100]);
    let x = tensor(&mut device, 4, &[1.0; 8]);
    let mut logits = device.tensor(2, 100).unwrap();
    let (short, right) = (TokenMask::new([1_u32]), TokenMask::new([1_u32, 0, 0, 0]));
    let weight = &heads.screened;
    let mut argmax = |device: &mut CpuDevice, allowed: &[Option<&TokenMask>]| {
        device.argmax(Argmax { x: &x, norm: None, weight, logits: &mut logits, allowed })
    };
    argmax(&mut device, &[Some(&short), Some(&right)]).unwrap();
    let sampled = results(&mut device).sampled;
    let refused = DeviceError::Misuse("a mask of 1 words for a vocabulary of 100".to_owned());
    assert_eq!(sampled[0], Err(refused), "{name}");
    assert_eq!(sampled[1].as_ref().map(|sampled| sampled.token), Ok(0), "{name}");
    let refused = DeviceError::Misuse("1 masks for an arg max of 2 rows".to_owned());
    assert_eq!(argmax(&mut device, &[Some(&right)]), Err(refused), "{name}");
    let mut out = device.tensor(2, 2).unwrap();
    let masked = Argmax { x: &x, norm: None, weight, logits: &mut logits, allowed: &[None, None] };
    let refused = DeviceError::Misuse("2 masks for an operation that takes none".to_owned());
    assert_eq!(device.partial_argmax(masked, 0, &mut out), Err(refused), "{name}");
}

#[test]
fn heads_that_cannot_have_a_screen_have_none() {
    let mut random = Random::new(61);
    let (inputs, outputs) = (40, 100);
    let sound = random.normals(outputs * inputs, 0.5);
    let values = random.normals(2 * inputs, 1.0);
    for (name, mut device) in devices() {
        for dtype in TYPES {
            let heads = Heads::new(&mut device, dtype, inputs, &sound);
            let [screened, plain] = [&heads.screened, &heads.plain].map(|head| device.matrix_bytes(head));
            let screen = device.screen_bytes(&heads.screened);
            assert!(screen > (outputs * inputs) as u64 && screened == plain + screen, "{name}: {screened}");
            assert_eq!(device.screen_bytes(&heads.plain), 0, "{name}");
            for garbage in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut weights = sound.clone();
                weights[77 * inputs + 3] = garbage;
                let heads = Heads::new(&mut device, dtype, inputs, &weights);
                assert_eq!(device.screen_bytes(&heads.screened), 0, "{name} {garbage}");
                check(&mut device, &format!("{name} {dtype:?} {garbage}"), &heads, &values, None);
            }
            let bytes = bytes(dtype, &sound);
            let source = [HostMatrix::new(&bytes, dtype, outputs, inputs)];
            let head = device.head_matrix(&source, Quantize::Int8).unwrap();
            assert_eq!(device.screen_bytes(&head), 0, "{name}: eight bits have no screen");
        }
        let mut device = device.with_screened_head(false);
        let heads = Heads::new(&mut device, WeightType::Bf16, inputs, &sound);
        assert_eq!(device.screen_bytes(&heads.screened), 0, "{name}: none is wanted");
    }
}

#[test]
fn the_memory_of_screened_steps_is_counted_and_final_after_the_first() {
    let (inputs, outputs, rows) = (40, 1003, 9);
    let mut random = Random::new(62);
    for (name, mut device) in devices() {
        let weights = random.normals(outputs * inputs, 0.5);
        let heads = Heads::new(&mut device, WeightType::Bf16, inputs, &weights);
        let mut x = device.tensor(rows, inputs).unwrap();
        let mut logits = device.tensor(rows, outputs).unwrap();
        let mut argmax = |device: &mut CpuDevice, rows: usize| {
            x.fill(&random.normals(rows * inputs, 1.0)).unwrap();
            let weight = &heads.screened;
            device.argmax(Argmax { x: &x, norm: None, weight, logits: &mut logits, allowed: &[] }).unwrap();
            device.step_bytes()
        };
        let before = device.step_bytes();
        let first = argmax(&mut device, 1);
        assert!(first >= before + (rows * outputs.div_ceil(16) * size_of::<f32>()) as u64, "{name}");
        assert!((1..=rows).all(|rows| argmax(&mut device, rows) == first), "{name}");
    }
}
