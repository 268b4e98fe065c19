//! Tests that `argmax`, which returns no logits, gives the same token as greedy sampling from the logits.

use tutti_kernels::{
    Argmax, Dense, Device, DeviceError, HostMatrix, Linear, Norm, Quantize, SampleRow, Sampler,
    SamplingParams, WeightType,
};

use crate::support::{Random, bytes, devices, results, tensor};

static GREEDY: SamplingParams = SamplingParams::GREEDY;

fn greedy(params: &SamplingParams) -> SampleRow<'_> {
    SampleRow { params, prompt: &[], output: &[], forbidden: &[], allowed: None, position: 0, logprobs: None }
}

#[test]
fn it_is_what_sampling_takes_ties_included() {
    for (name, mut device) in devices("argmax") {
        let mut random = Random::new(41);
        for (dtype, quantize) in [
            (WeightType::F32, Quantize::None),
            (WeightType::Bf16, Quantize::None),
            (WeightType::Bf16, Quantize::Int8),
        ] {
            for (inputs, vocabulary) in [(20, 7), (64, 530), (1030, 300)] {
                // Every row of weights occurs several times, at distant and at adjacent indices, so that every logit
                // occurs several times.
                let kinds = random.normals(23 * inputs, 0.5);
                let kind = |token: usize| (token / 2 * 5) % 23;
                let weights: Vec<f32> = (0..vocabulary)
                    .flat_map(|token| kinds[kind(token) * inputs..][..inputs].to_vec())
                    .collect();
                let weights = bytes(dtype, &weights);
                let source = HostMatrix::new(&weights, dtype, vocabulary, inputs);
                let weight = device.matrix(&[source], quantize).unwrap();
                let norm = device.vector(&random.normals(inputs, 1.0)).unwrap();
                for rows in [1, 2, 5, 13, 32] {
                    let x = random.normals(rows * inputs, 1.0);
                    let x = tensor(&mut device, inputs, &x);
                    let mut logits = device.tensor(rows, vocabulary).unwrap();
                    let norm = || Norm { weight: &norm, eps: 1e-6 };
                    device
                        .linear(Linear { norm: Some(norm()), ..Linear::plain(&x, &weight) }, &mut logits)
                        .unwrap();
                    let wanted: Vec<_> = (0..rows).map(|row| (row, greedy(&GREEDY))).collect();
                    device.sample(&logits, &wanted).unwrap();
                    let argmax = Argmax {
                        x: &x,
                        norm: Some(norm()),
                        weight: &weight,
                        logits: &mut logits,
                        allowed: &[],
                    };
                    device.argmax(argmax).unwrap();
                    let results = results(&mut device).sampled;
                    let what = format!("{name} {dtype:?} {quantize:?} {rows}x{inputs}x{vocabulary}");
                    assert_eq!(results.len(), 2 * rows, "{what}");
                    assert_eq!(results[rows..], results[..rows], "{what}");
                    assert!(results.iter().all(Result::is_ok), "{what}");
                }
            }
        }
    }
}

/// The vocabulary is divided into shards, as among ranks. The best candidate is the token of the whole vocabulary, also
/// with ties. A row with a bad logit in any shard gets an error.
#[test]
fn candidates_of_shards_give_the_token_of_the_whole() {
    const VOCABULARY: usize = 60;
    for (name, mut device) in devices("candidates") {
        let mut random = Random::new(43);
        let x = random.normals(9 * 4, 1.0);
        // Tokens whose ids differ by a multiple of 20 have equal weights, such as tokens 3, 23 and 43.
        let kinds = random.normals(20 * 4, 0.5);
        let mut weights: Vec<f32> =
            (0..VOCABULARY).flat_map(|token| kinds[token % 20 * 4..][..4].to_vec()).collect();
        let x = tensor(&mut device, 4, &x);
        for garbage in [None, Some(f32::NAN), Some(f32::INFINITY)] {
            if let Some(garbage) = garbage {
                weights[50 * 4] = garbage;
            }
            let bytes = bytes(WeightType::F32, &weights);
            let mut logits = device.tensor(9, VOCABULARY).unwrap();
            let mut all = device.tensor(9, 6).unwrap();
            let mut columns = vec![[0.0; 6]; 9];
            for shard in 0..3 {
                let source = HostMatrix::new(&bytes[shard * 320..][..320], WeightType::F32, 20, 4);
                let weight = device.matrix(&[source], Quantize::None).unwrap();
                let (mut logits, mut out) = (device.tensor(9, 20).unwrap(), device.tensor(9, 2).unwrap());
                let argmax = Argmax { x: &x, norm: None, weight: &weight, logits: &mut logits, allowed: &[] };
                device.partial_argmax(argmax, shard * 20, &mut out).unwrap();
                for (row, out) in columns.iter_mut().zip(out.values().chunks(2)) {
                    row[2 * shard..2 * shard + 2].copy_from_slice(out);
                }
            }
            device.upload(&columns.concat(), &mut all).unwrap();
            device.best_candidates(&all).unwrap();
            let source = HostMatrix::new(&bytes, WeightType::F32, VOCABULARY, 4);
            let weight = device.matrix(&[source], Quantize::None).unwrap();
            device
                .argmax(Argmax { x: &x, norm: None, weight: &weight, logits: &mut logits, allowed: &[] })
                .unwrap();
            let results = results(&mut device).sampled;
            assert_eq!(results[..9], results[9..], "{name}");
            let refused = |row: &&Result<_, _>| matches!(row, Err(DeviceError::NotFinite(_)));
            // With an infinite weight, rows with a positive infinite logit are refused.
            let wanted = garbage.map_or(0..=0, |garbage| if garbage.is_nan() { 9..=9 } else { 1..=8 });
            let count = results[..9].iter().filter(refused).count();
            assert!(wanted.contains(&count), "{name}, {garbage:?}: {results:?}");
            assert!(
                results.iter().flatten().all(|sampled| sampled.token < 20),
                "{name}: the lowest of equals"
            );
        }
    }
}

#[test]
fn garbage_is_refused() {
    for (name, mut device) in devices("argmax garbage") {
        let norm = device.vector(&[1.0]).unwrap();
        let mut logits = device.tensor(2, 20).unwrap();
        for garbage in [f32::NAN, f32::INFINITY] {
            let mut weights = [0.5; 20];
            weights[17] = garbage;
            let bytes = bytes(WeightType::F32, &weights);
            let source = HostMatrix::new(&bytes, WeightType::F32, 20, 1);
            let weight = device.matrix(&[source], Quantize::None).unwrap();
            let x = tensor(&mut device, 1, &[1.0, 2.0]);
            let norm = Some(Norm { weight: &norm, eps: 0.0 });
            device
                .argmax(Argmax { x: &x, norm, weight: &weight, logits: &mut logits, allowed: &[] })
                .unwrap();
            for row in results(&mut device).sampled {
                assert!(matches!(row, Err(DeviceError::NotFinite(_))), "{name}: {garbage}");
            }
        }
    }
}

#[test]
fn garbage_in_one_row_leaves_the_others_their_tokens() {
    for (name, mut device) in devices("argmax garbage row") {
        let mut logits = device.tensor(3, 20).unwrap();
        let mut weights = [0.5; 20];
        weights[17] = 0.75;
        let bytes = bytes(WeightType::F32, &weights);
        let source = HostMatrix::new(&bytes, WeightType::F32, 20, 1);
        let weight = device.matrix(&[source], Quantize::None).unwrap();
        for garbage in [f32::NAN, f32::INFINITY] {
            let x = tensor(&mut device, 1, &[1.0, garbage, 2.0]);
            device
                .argmax(Argmax { x: &x, norm: None, weight: &weight, logits: &mut logits, allowed: &[] })
                .unwrap();
            let sampled = results(&mut device).sampled;
            let tokens: Vec<_> = sampled.iter().map(|row| row.as_ref().ok().map(|row| row.token)).collect();
            assert_eq!(tokens, [Some(17), None, Some(17)], "{name}: {garbage}");
            assert!(matches!(&sampled[1], Err(DeviceError::NotFinite(_))), "{name}: {garbage}");
        }
    }
}

#[test]
fn rows_that_need_more_than_the_likeliest_token_need_logits() {
    assert!(greedy(&GREEDY).takes_the_likeliest());
    for params in [
        SamplingParams { temperature: 0.5, ..GREEDY.clone() },
        SamplingParams { logit_bias: vec![(1, 2.0).into()], ..GREEDY.clone() },
        SamplingParams { repetition_penalty: 1.1, ..GREEDY.clone() },
        SamplingParams { presence_penalty: 0.1, ..GREEDY.clone() },
        SamplingParams { frequency_penalty: -0.1, ..GREEDY.clone() },
    ] {
        assert!(!greedy(&params).takes_the_likeliest(), "{params:?}");
    }
    assert!(!SampleRow { forbidden: &[1], ..greedy(&GREEDY) }.takes_the_likeliest());
    assert!(!SampleRow { logprobs: Some(0), ..greedy(&GREEDY) }.takes_the_likeliest());
}
