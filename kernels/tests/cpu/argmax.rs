//! The arg max without logits gives the same token as greedy sampling from the logits.

use tutti_kernels::{
    Argmax, Dense, Device, DeviceError, HostMatrix, Linear, Norm, Quantize, SampleRow, Sampler,
    SamplingParams, WeightType,
};

use crate::support::{Random, bytes, devices, results, tensor};

static GREEDY: SamplingParams = SamplingParams {
    temperature: 0.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    repetition_penalty: 1.0,
    presence_penalty: 0.0,
    frequency_penalty: 0.0,
    logit_bias: Vec::new(),
    seed: 1,
};

fn greedy(params: &SamplingParams) -> SampleRow<'_> {
    SampleRow { params, prompt: &[], output: &[], forbidden: &[], position: 0, logprobs: None }
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
                // Every row of weights occurs several times, at distant and at adjacent indices, so that all logits tie.
                let kinds = random.normals(23 * inputs, 0.5);
                let kind = |token: usize| (token / 2 * 5) % 23;
                let weights: Vec<f32> = (0..vocabulary)
                    .flat_map(|token| kinds[kind(token) * inputs..][..inputs].to_vec())
                    .collect();
                let weights = bytes(dtype, &weights);
                let source = HostMatrix { bytes: &weights, dtype, rows: vocabulary, columns: inputs };
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
                    let argmax = Argmax { x: &x, norm: Some(norm()), weight: &weight, logits: &mut logits };
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

#[test]
fn garbage_is_refused() {
    for (name, mut device) in devices("argmax garbage") {
        let norm = device.vector(&[1.0]).unwrap();
        let mut logits = device.tensor(2, 20).unwrap();
        for garbage in [f32::NAN, f32::INFINITY] {
            let mut weights = [0.5; 20];
            weights[17] = garbage;
            let bytes = bytes(WeightType::F32, &weights);
            let source = HostMatrix { bytes: &bytes, dtype: WeightType::F32, rows: 20, columns: 1 };
            let weight = device.matrix(&[source], Quantize::None).unwrap();
            let x = tensor(&mut device, 1, &[1.0, 2.0]);
            let norm = Some(Norm { weight: &norm, eps: 0.0 });
            let result = device.argmax(Argmax { x: &x, norm, weight: &weight, logits: &mut logits });
            assert!(matches!(result, Err(DeviceError::Lost(_))), "{name}: {garbage}");
        }
    }
}

#[test]
fn rows_that_need_more_than_the_likeliest_token_need_logits() {
    assert!(greedy(&GREEDY).takes_the_likeliest());
    for params in [
        SamplingParams { temperature: 0.5, ..GREEDY.clone() },
        SamplingParams { logit_bias: vec![(1, 2.0)], ..GREEDY.clone() },
        SamplingParams { repetition_penalty: 1.1, ..GREEDY.clone() },
        SamplingParams { presence_penalty: 0.1, ..GREEDY.clone() },
        SamplingParams { frequency_penalty: -0.1, ..GREEDY.clone() },
    ] {
        assert!(!greedy(&params).takes_the_likeliest(), "{params:?}");
    }
    assert!(!SampleRow { forbidden: &[1], ..greedy(&GREEDY) }.takes_the_likeliest());
    assert!(!SampleRow { logprobs: Some(0), ..greedy(&GREEDY) }.takes_the_likeliest());
}
