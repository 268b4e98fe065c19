//! Tests that sampled tokens, scores and logprobs are those of the CPU device.

use tutti_kernels::cpu::Isa;
use tutti_kernels::{
    Argmax, DeviceError, SampleRow, Sampled, Sampler, SamplingParams, ScoreRow, StepResults, TokenMask,
    TokenScore, WeightType,
};

use crate::support::{Families, Random, assert_near, bits, cpus, cuda, matrix, results, tensor, values};

static GREEDY: SamplingParams = SamplingParams::GREEDY;

fn row(params: &SamplingParams) -> SampleRow<'_> {
    SampleRow { params, prompt: &[], output: &[], forbidden: &[], allowed: None, position: 0, logprobs: None }
}

/// Returns parameters of all kinds, for a vocabulary of `width`.
fn kinds(width: usize) -> Vec<SamplingParams> {
    let warm = SamplingParams { temperature: 0.8, ..GREEDY.clone() };
    let last = width as u32 - 1;
    let mut kinds = vec![
        GREEDY.clone(),
        warm.clone(),
        SamplingParams { temperature: 3.0, ..GREEDY.clone() },
        SamplingParams { top_k: 1, ..warm.clone() },
        SamplingParams { top_k: 5, ..warm.clone() },
        SamplingParams { top_k: u32::MAX, ..warm.clone() },
        SamplingParams { top_p: 0.5, ..warm.clone() },
        SamplingParams { top_p: 0.95, ..warm.clone() },
        SamplingParams { top_p: 1e-6, ..warm.clone() },
        SamplingParams { min_p: 0.1, ..warm.clone() },
        SamplingParams { top_k: 20, top_p: 0.8, min_p: 0.01, ..warm.clone() },
        SamplingParams { repetition_penalty: 1.3, ..GREEDY.clone() },
        SamplingParams { presence_penalty: 0.7, frequency_penalty: 0.2, ..GREEDY.clone() },
        SamplingParams { repetition_penalty: 0.9, frequency_penalty: -0.3, top_k: 9, ..warm.clone() },
        SamplingParams { logit_bias: vec![(0, 3.0).into(), (last, -2.5).into()], ..warm.clone() },
    ];
    kinds.iter_mut().zip(0..).for_each(|(params, seed)| params.seed = seed << 33 | seed);
    kinds
}

/// Samples with all kinds of parameters at several positions.
fn sample<D: Families>(device: &mut D, width: usize, kinds: &[SamplingParams]) -> StepResults {
    let logits = Random::new(width as u64).normals(3 * width, 2.0);
    let logits = tensor(device, width, &logits);
    let last = width as u32 - 1;
    let (prompt, output) = ([last, 0, last / 2, last / 2], [last / 3, last, last / 3, last / 3]);
    let never = [last / 5];
    let words = TokenMask::words_of(width);
    let masks =
        [2, 3].map(|every| TokenMask::of_tokens(words, (0..=last).filter(|token| token % every != 0)));
    let mut rows = Vec::new();
    for (index, params) in kinds.iter().enumerate() {
        for position in [0, 1, 1 << 40] {
            let logprobs = (index % 3 != 0).then_some(index as u32 % 7);
            let (prompt, output, forbidden) = (&prompt[..], &output[..], &never[index % 2..]);
            let allowed = masks.get((index + position as usize) % 3);
            rows.push((
                index % 3,
                SampleRow { params, prompt, output, forbidden, allowed, position, logprobs },
            ));
        }
    }
    device.sample(&logits, &rows).unwrap();
    results(device).unwrap()
}

#[track_caller]
fn assert_scores(what: &str, got: &TokenScore, want: &TokenScore) {
    assert!((got.logprob - want.logprob).abs() < 1e-5, "{what}: {got:?} for {want:?}");
    assert_eq!((got.rank, got.top.len()), (want.rank, want.top.len()), "{what}");
    for (got, want) in got.top.iter().zip(&want.top) {
        assert!(got.0 == want.0 && (got.1 - want.1).abs() < 1e-5, "{what}: {got:?} for {want:?}");
    }
}

#[test]
fn sampled_tokens_and_logprobs_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("sampling") else { return };
    for width in [7, 256, 1000, 4099] {
        let kinds = kinds(width);
        let got = sample(&mut gpu, width, &kinds);
        for (isa, mut cpu) in cpus() {
            let want = sample(&mut cpu, width, &kinds);
            assert_eq!(got.sampled.len(), want.sampled.len());
            for (index, (got, want)) in got.sampled.iter().zip(&want.sampled).enumerate() {
                let what = format!("{width} logits on {isa}, {:?}", kinds[index / 3]);
                let (got, want): (&Sampled, &Sampled) = (got.as_ref().unwrap(), want.as_ref().unwrap());
                assert_eq!(got.token, want.token, "{what}");
                assert_eq!(got.score.is_some(), want.score.is_some(), "{what}");
                if let (Some(got), Some(want)) = (&got.score, &want.score) {
                    assert_scores(&what, got, want);
                }
            }
        }
    }
}

#[test]
fn equal_logits_are_ordered_by_id() {
    let Some(mut gpu) = cuda("ties") else { return };
    let params = SamplingParams { temperature: 1.0, top_k: 3, ..GREEDY.clone() };
    let mut logits = vec![0.0; 600];
    (logits[7], logits[500]) = (1.0, 1.0);
    let logits = tensor(&mut gpu, 600, &logits);
    let rows: Vec<_> =
        (0..64).map(|position| (0, SampleRow { position, logprobs: Some(4), ..row(&params) })).collect();
    gpu.sample(&logits, &rows).unwrap();
    for sampled in results(&mut gpu).unwrap().sampled {
        let sampled = sampled.unwrap();
        assert!(
            [7, 500, 0].contains(&sampled.token),
            "{sampled:?}: the third is the lowest id of the equals"
        );
        let top: Vec<u32> = sampled.score.unwrap().top.iter().map(|(token, _)| *token).collect();
        assert_eq!(top, [7, 500, 0, 1]);
    }
}

fn scores<D: Families>(device: &mut D) -> Vec<TokenScore> {
    let logits = Random::new(4).normals(5 * 333, 3.0);
    let logits = tensor(device, 333, &logits);
    let rows =
        [(0, 3), (2, 332), (2, 0), (4, 20)].map(|(row, token)| (row, ScoreRow { token, top: token % 50 }));
    device.score(&logits, &rows).unwrap();
    results(device).unwrap().scores.into_iter().map(Result::unwrap).collect()
}

#[test]
fn scores_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("scores") else { return };
    let got = scores(&mut gpu);
    for (isa, mut cpu) in cpus() {
        let want = scores(&mut cpu);
        assert_eq!((got.len(), want.len()), (4, 4));
        got.iter().zip(&want).for_each(|(got, want)| assert_scores(&format!("score on {isa}"), got, want));
    }
}

/// Returns the tokens of an arg max, and the candidates of two shards.
fn likeliest<D: Families>(device: &mut D) -> (Vec<u32>, Vec<f32>) {
    let mut random = Random::new(43);
    let x = tensor(device, 8, &random.normals(9 * 8, 1.0));
    // Every row of weights occurs twice, so that each row of logits has ties.
    let weights = random.normals(300 * 8, 0.5).repeat(2);
    let weight = matrix(device, WeightType::F32, 600, &weights);
    let mut logits = device.tensor(10, 600).unwrap();
    device.argmax(Argmax { x: &x, norm: None, weight: &weight, logits: &mut logits, allowed: &[] }).unwrap();
    let mut out = device.tensor(9, 2).unwrap();
    let mut candidates = vec![Vec::new(); 9];
    for shard in 0..2 {
        let weight = matrix(device, WeightType::F32, 300, &weights[shard * 2400..][..2400]);
        let mut logits = device.tensor(9, 300).unwrap();
        let argmax = Argmax { x: &x, norm: None, weight: &weight, logits: &mut logits, allowed: &[] };
        device.partial_argmax(argmax, shard * 300, &mut out).unwrap();
        let got = values(device, &out);
        candidates.iter_mut().zip(got.chunks(2)).for_each(|(all, own)| all.extend_from_slice(own));
    }
    let candidates = candidates.concat();
    let all = tensor(device, 4, &candidates);
    device.best_candidates(&all).unwrap();
    let tokens = results(device).unwrap().sampled.into_iter().map(|sampled| sampled.unwrap().token);
    (tokens.collect(), candidates.iter().skip(1).step_by(2).copied().collect())
}

#[test]
fn the_likeliest_tokens_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("arg max") else { return };
    let got = likeliest(&mut gpu);
    for (isa, mut cpu) in cpus() {
        let want = likeliest(&mut cpu);
        assert_eq!(got.0, want.0, "{isa}");
        // The portable path may round products and sums of f32 separately.
        match isa {
            Isa::Portable => assert_near("candidates", &got.1, &want.1, 1e-6),
            _ => assert_eq!(bits(&got.1), bits(&want.1), "{isa}"),
        }
    }
    assert_eq!(got.0[..9], got.0[9..], "the candidates of shards give the token of the whole");
    assert!(got.0.iter().all(|&token| token < 300), "the lowest of equals");
}

#[test]
fn logits_that_are_not_finite_lose_the_device_and_a_row_without_a_token_fails_alone() {
    let Some(mut gpu) = cuda("garbage") else { return };
    let mut logits = vec![0.5; 40];
    let good = tensor(&mut gpu, 20, &logits);
    let all: Vec<u32> = (0..20).collect();
    let odd = TokenMask::of_tokens(1, (1..20).step_by(2));
    let even: Vec<u32> = (0..20).step_by(2).collect();
    let impossible = SampleRow { forbidden: &all, ..row(&GREEDY) };
    let masked = SampleRow { allowed: Some(&odd), ..row(&GREEDY) };
    let odds: Vec<u32> = (1..20).step_by(2).collect();
    let masked_away = SampleRow { forbidden: &odds, ..masked };
    let rows = [impossible, row(&GREEDY), masked, masked_away, SampleRow { forbidden: &even, ..masked }];
    gpu.sample(&good, &rows.map(|row| (0, row))).unwrap();
    let sampled = results(&mut gpu).unwrap().sampled;
    assert!(matches!(sampled[0], Err(DeviceError::Misuse(_))), "{sampled:?}");
    assert_eq!(sampled[1].as_ref().unwrap().token, 0);
    assert_eq!(sampled[2].as_ref().unwrap().token, 1);
    assert!(matches!(sampled[3], Err(DeviceError::Misuse(_))), "{sampled:?}");
    assert_eq!(sampled[4].as_ref().unwrap().token, 1);
    let long = TokenMask::new([1, 1]);
    let long = SampleRow { allowed: Some(&long), ..row(&GREEDY) };
    assert!(matches!(gpu.sample(&good, &[(0, long)]), Err(DeviceError::Misuse(_))));
    let bad_bias = SamplingParams { logit_bias: vec![(20, 1.0).into()], ..GREEDY.clone() };
    assert!(matches!(gpu.sample(&good, &[(0, row(&bad_bias))]), Err(DeviceError::Misuse(_))));
    assert!(matches!(gpu.sample(&good, &[(2, row(&GREEDY))]), Err(DeviceError::Misuse(_))));
    for garbage in [f32::NAN, f32::INFINITY] {
        logits[27] = garbage;
        let bad = tensor(&mut gpu, 20, &logits);
        gpu.sample(&bad, &[(0, row(&GREEDY)), (1, row(&GREEDY))]).unwrap();
        let sampled = results(&mut gpu).unwrap().sampled;
        assert!(matches!(sampled[..], [Ok(_), Err(DeviceError::NotFinite(_))]), "{sampled:?}");
        gpu.score(&bad, &[(0, ScoreRow { token: 3, top: 0 }), (1, ScoreRow { token: 3, top: 0 })]).unwrap();
        let scores = results(&mut gpu).unwrap().scores;
        assert!(matches!(scores[..], [Ok(_), Err(DeviceError::NotFinite(_))]), "{scores:?}");
    }
}
