//! Tests sampling and scoring through the device.

use tutti_kernels::cpu::{CpuDevice, Isa};
use tutti_kernels::{
    Device, DeviceError, PlanesShape, SampleRow, Sampled, Sampler, SamplingParams, ScoreRow, StepResults,
    TokenMask,
};

use crate::support::{Random, devices, results, tensor, try_begin};

static GREEDY: SamplingParams = SamplingParams::GREEDY;

fn row(params: &SamplingParams) -> SampleRow<'_> {
    SampleRow { params, prompt: &[], output: &[], forbidden: &[], allowed: None, position: 0, logprobs: None }
}

fn one(device: &mut CpuDevice, logits: &[f32], row: SampleRow<'_>) -> Result<Sampled, DeviceError> {
    let logits = tensor(device, logits.len(), logits);
    device.sample(&logits, &[(0, row)])?;
    results(device).sampled.remove(0)
}

fn token(device: &mut CpuDevice, logits: &[f32], row: SampleRow<'_>) -> u32 {
    one(device, logits, row).unwrap().token
}

/// Number of occurrences of each token at positions `0 .. draws`.
fn counts(device: &mut CpuDevice, logits: &[f32], row: SampleRow<'_>, draws: usize) -> Vec<usize> {
    let tensor = tensor(device, logits.len(), logits);
    let rows: Vec<_> =
        (0..draws).map(|position| (0, SampleRow { position: position as u64, ..row })).collect();
    device.sample(&tensor, &rows).unwrap();
    let mut counts = vec![0; logits.len()];
    results(device).sampled.into_iter().for_each(|sampled| counts[sampled.unwrap().token as usize] += 1);
    counts
}

/// Asserts that Pearson's statistic accepts probabilities in proportion to `weights`, and that no token of weight 0
/// occurs.
#[track_caller]
fn assert_distribution(what: &str, counts: &[usize], weights: &[f64]) {
    let (draws, total) = (counts.iter().sum::<usize>() as f64, weights.iter().sum::<f64>());
    let mut statistic = 0.0;
    let mut cells = 0.0_f64;
    for (token, (&count, &weight)) in counts.iter().zip(weights).enumerate() {
        if weight == 0.0 {
            assert_eq!(count, 0, "{what}: token {token} should never come");
            continue;
        }
        let expected = draws * weight / total;
        statistic += (count as f64 - expected).powi(2) / expected;
        cells += 1.0;
    }
    // Five standard deviations above the mean of a chi-square distribution.
    let freedom = (cells - 1.0).max(1.0);
    assert!(
        statistic < freedom + 5.0 * (2.0 * freedom).sqrt(),
        "{what}: {statistic} for {freedom}: {counts:?}"
    );
}

fn weights(logits: &[f32], temperature: f64) -> Vec<f64> {
    logits.iter().map(|&logit| (f64::from(logit) / temperature).exp()).collect()
}

#[test]
fn greedy_takes_the_largest_and_the_lowest_id_of_equals() {
    for (name, mut device) in devices("greedy") {
        let mut logits = Random::new(8).normals(3000, 1.0);
        (logits[77], logits[2048], logits[1]) = (9.5, 9.5, 9.4);
        assert_eq!(token(&mut device, &logits, row(&GREEDY)), 77, "{name}");
        logits[77] = f32::NEG_INFINITY;
        assert_eq!(token(&mut device, &logits, row(&GREEDY)), 2048, "{name}");
    }
}

#[test]
fn draws_follow_the_distribution() {
    let logits = [1.0, 0.0, -1.0, 2.0, -20.0, 0.5, 0.5, -3.0];
    for (name, mut device) in devices("distribution") {
        for temperature in [1.0_f32, 0.5, 2.0] {
            let params = SamplingParams { temperature, seed: 42, ..GREEDY.clone() };
            let got = counts(&mut device, &logits, row(&params), 20_000);
            let mut want = weights(&logits, f64::from(temperature));
            // Token 4 may be too rare for the statistic.
            want[4] = if got[4] == 0 { 0.0 } else { want[4] };
            assert_distribution(&format!("{name} at {temperature}"), &got, &want);
        }
    }
}

#[test]
fn truncation_keeps_what_it_should() {
    // Probabilities 0.4, 0.3, 0.15, 0.1, 0.05, in another order.
    let probabilities = [0.15_f64, 0.4, 0.05, 0.3, 0.1];
    let logits: Vec<f32> = probabilities.iter().map(|p| p.ln() as f32 + 3.0).collect();
    let sampling = SamplingParams { temperature: 1.0, seed: 7, ..GREEDY.clone() };
    let keep = |kept: &[usize]| -> Vec<f64> {
        probabilities.iter().enumerate().map(|(id, &p)| if kept.contains(&id) { p } else { 0.0 }).collect()
    };
    for (name, mut device) in devices("truncation") {
        for (params, kept) in [
            (SamplingParams { top_k: 1, ..sampling.clone() }, &[1][..]),
            (SamplingParams { top_k: 3, ..sampling.clone() }, &[0, 1, 3]),
            (SamplingParams { top_k: 9, ..sampling.clone() }, &[0, 1, 2, 3, 4]),
            (SamplingParams { top_p: 0.69, ..sampling.clone() }, &[1, 3]),
            (SamplingParams { top_p: 0.71, ..sampling.clone() }, &[0, 1, 3]),
            (SamplingParams { top_p: 1e-6, ..sampling.clone() }, &[1]),
            (SamplingParams { min_p: 0.3, ..sampling.clone() }, &[0, 1, 3]),
            (SamplingParams { min_p: 1.0, ..sampling.clone() }, &[1]),
            // The three likeliest have a mass of 0.85: 0.4 is less than half of it, and 0.7 is more.
            (SamplingParams { top_k: 3, top_p: 0.5, ..sampling.clone() }, &[1, 3]),
            (SamplingParams { top_k: 2, min_p: 0.9, ..sampling.clone() }, &[1]),
        ] {
            let got = counts(&mut device, &logits, row(&params), 4_000);
            assert_distribution(&format!("{name} {params:?}"), &got, &keep(kept));
        }
    }
}

#[test]
fn equals_at_the_border_are_cut_by_lowest_id() {
    for (name, mut device) in devices("ties") {
        let params = SamplingParams { temperature: 1.0, top_k: 3, ..GREEDY.clone() };
        let got = counts(&mut device, &[0.0, 1.0, 0.0, 0.0, 0.0], row(&params), 2_000);
        assert!(got[0] > 0 && got[2] > 0 && got[3] == 0 && got[4] == 0, "{name}: {got:?}");
    }
}

#[test]
fn penalties_bias_and_forbidden_tokens() {
    let logits = [2.0, 1.5, -1.0, 1.9];
    for (name, mut device) in devices("penalties") {
        let check =
            |device: &mut CpuDevice, params: SamplingParams, prompt: &[u32], output: &[u32], want: u32| {
                let got = token(device, &logits, SampleRow { prompt, output, ..row(&params) });
                assert_eq!(got, want, "{name} {params:?}");
            };
        let repetition = SamplingParams { repetition_penalty: 1.2, ..GREEDY.clone() };
        check(&mut device, repetition.clone(), &[], &[], 0);
        // The penalised logit is 2 / 1.2 = 1.67.
        check(&mut device, repetition.clone(), &[0], &[], 3);
        // 2 / 1.04 = 1.92: the penalty applies once per token, however often it occurs in prompt and output.
        let gentle = SamplingParams { repetition_penalty: 1.04, ..GREEDY.clone() };
        check(&mut device, gentle, &[0, 0, 0], &[0], 0);
        check(&mut device, repetition, &[0], &[3, 3], 0);
        let presence = SamplingParams { presence_penalty: 0.3, ..GREEDY.clone() };
        check(&mut device, presence.clone(), &[0], &[], 0);
        check(&mut device, presence.clone(), &[], &[0, 0, 0, 3], 0);
        check(&mut device, presence, &[], &[0], 3);
        let frequency = SamplingParams { frequency_penalty: 0.06, ..GREEDY.clone() };
        check(&mut device, frequency.clone(), &[], &[0], 0);
        check(&mut device, frequency, &[], &[0, 0], 3);
        // A penalty on a negative logit multiplies: -1 * 3 stays below the others, and 2 / 3 falls below 1.5.
        let strong = SamplingParams { repetition_penalty: 3.0, ..GREEDY.clone() };
        check(&mut device, strong, &[0, 2, 3], &[], 1);
        let bias = SamplingParams { logit_bias: vec![(1, -1.0).into(), (2, 3.5).into()], ..GREEDY.clone() };
        check(&mut device, bias, &[], &[], 2);
        assert_eq!(
            token(&mut device, &logits, SampleRow { forbidden: &[0, 3], ..row(&GREEDY) }),
            1,
            "{name}"
        );
        let sampling = SamplingParams { temperature: 1.0, ..GREEDY.clone() };
        let got = counts(&mut device, &logits, SampleRow { forbidden: &[0, 3], ..row(&sampling) }, 2_000);
        assert_distribution(&name, &got, &[0.0, 1.5_f64.exp(), (-1.0_f64).exp(), 0.0]);
        // The counts of tokens are reset: the same row without penalties gives the same token as before.
        assert_eq!(token(&mut device, &logits, row(&GREEDY)), 0, "{name}");
    }
}

/// A mask has the effect of forbidding all other tokens.
#[test]
fn a_mask_allows_its_tokens_alone() {
    let vocabulary = 1_003;
    let logits = Random::new(5).normals(vocabulary, 2.0);
    let random = &mut Random::new(6);
    for (name, mut device) in devices("masks") {
        for round in 0..60 {
            // Masks of few tokens, of most, of whole words, and of none but the last.
            let allowed: Vec<u32> = match round % 4 {
                0 => (0..3).map(|_| random.below(vocabulary) as u32).collect(),
                1 => (0..vocabulary as u32).filter(|_| random.below(9) > 0).collect(),
                2 => (0..vocabulary as u32).filter(|token| token / 32 % 3 == round / 4 % 3).collect(),
                _ => vec![vocabulary as u32 - 1],
            };
            let others: Vec<u32> = (0..vocabulary as u32).filter(|token| !allowed.contains(token)).collect();
            let mask = TokenMask::of_tokens(TokenMask::words_of(vocabulary), allowed.iter().copied());
            // Bits behind the vocabulary have no meaning.
            let mut words = mask.words().to_vec();
            *words.last_mut().unwrap() |= 1 << 31;
            let mask = TokenMask::new(words);
            let params = SamplingParams {
                temperature: [0.0, 1.0][round as usize / 2 % 2],
                repetition_penalty: 1.3,
                logit_bias: vec![(others[0], 50.0).into(), (allowed[0], -1.0).into()],
                seed: round.into(),
                ..GREEDY.clone()
            };
            let plain = SampleRow { prompt: &[others[0]], output: &[allowed[0]], ..row(&params) };
            let got = token(&mut device, &logits, SampleRow { allowed: Some(&mask), ..plain });
            assert!(allowed.contains(&got), "{name}: {got} of {allowed:?}");
            assert_eq!(got, token(&mut device, &logits, SampleRow { forbidden: &others, ..plain }), "{name}");
        }
        let (empty, short) = (TokenMask::new(vec![0; 32]), TokenMask::new(vec![1; 31]));
        for mask in [&empty, &short] {
            let result = one(&mut device, &logits, SampleRow { allowed: Some(mask), ..row(&GREEDY) });
            assert!(matches!(result, Err(DeviceError::Misuse(_))), "{name}: {result:?}");
        }
    }
}

/// A draw depends only on (seed, position) and the row.
#[test]
fn a_draw_does_not_depend_on_its_batch() {
    for (name, mut device) in devices("draws") {
        let vocabulary = 5_000;
        let logits = Random::new(9).normals(6 * vocabulary, 2.0);
        let params: Vec<SamplingParams> = (0..6)
            .map(|seed| SamplingParams {
                temperature: 0.9,
                top_k: [0, 50][seed % 2],
                top_p: [1.0, 0.9, 0.5][seed % 3],
                seed: seed as u64 / 2,
                ..GREEDY.clone()
            })
            .collect();
        let tensor = tensor(&mut device, vocabulary, &logits);
        let rows: Vec<_> = (0..6)
            .map(|i| (i, SampleRow { position: i as u64, logprobs: Some(3), ..row(&params[i]) }))
            .collect();
        device.sample(&tensor, &rows).unwrap();
        let batch: Vec<_> = results(&mut device).sampled.into_iter().map(Result::unwrap).collect();
        for (index, sample) in rows {
            let alone =
                one(&mut device, &logits[index * vocabulary..(index + 1) * vocabulary], sample).unwrap();
            assert_eq!(alone, batch[index], "{name} {index}");
        }
        // Other seeds and positions give other tokens.
        let flat = vec![0.0; vocabulary];
        let drawn = |device: &mut CpuDevice, seed, position| {
            let params = SamplingParams { temperature: 1.0, seed, ..GREEDY.clone() };
            token(device, &flat, SampleRow { position, ..row(&params) })
        };
        let first = drawn(&mut device, 1, 1);
        assert_eq!(first, drawn(&mut device, 1, 1), "{name}");
        assert!(first != drawn(&mut device, 1, 2) && first != drawn(&mut device, 2, 1), "{name}");
    }
}

#[test]
fn logprobs_are_of_the_raw_logits() {
    let logits = [2.0_f32, 1.0, 0.0, 2.0];
    let normaliser = logits.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
    let logprob = |id: usize| (f64::from(logits[id]) - normaliser) as f32;
    for (name, mut device) in devices("logprobs") {
        let params =
            SamplingParams { logit_bias: vec![(2, 50.0).into()], temperature: 0.1, ..GREEDY.clone() };
        let got = one(&mut device, &logits, SampleRow { logprobs: Some(2), ..row(&params) }).unwrap();
        let score = got.score.unwrap();
        assert_eq!((got.token, score.rank), (2, 4), "{name}");
        assert!((score.logprob - logprob(2)).abs() < 1e-6, "{name}");
        assert_eq!(score.top.iter().map(|&(id, _)| id).collect::<Vec<_>>(), [0, 3], "{name}");
        let tensor = tensor(&mut device, 4, &logits);
        let known = [(0, ScoreRow { token: 1, top: 0 }), (0, ScoreRow { token: 3, top: 1 })];
        device.score(&tensor, &known).unwrap();
        let scores: Vec<_> = results(&mut device).scores.into_iter().map(Result::unwrap).collect();
        assert!((scores[0].logprob - logprob(1)).abs() < 1e-6, "{name}");
        assert_eq!((scores[0].rank, scores[0].top.len()), (3, 0), "{name}");
        assert_eq!((scores[1].rank, scores[1].top.len()), (1, 1), "{name}");
    }
}

#[test]
fn garbage_is_never_a_token() {
    for (name, mut device) in devices("garbage") {
        let sampling = SamplingParams { temperature: 1.0, top_p: 0.9, ..GREEDY.clone() };
        for params in [&GREEDY, &sampling] {
            for garbage in [f32::NAN, f32::INFINITY] {
                let mut logits = vec![0.0; 100];
                logits[63] = garbage;
                let result = one(&mut device, &logits, row(params));
                assert!(matches!(result, Err(DeviceError::NotFinite(_))), "{name} {garbage}: {result:?}");
            }
            let all = SampleRow { forbidden: &[0, 1, 2], ..row(params) };
            assert!(matches!(one(&mut device, &[0.0; 3], all), Err(DeviceError::Misuse(_))), "{name}");
            let outside = SampleRow { prompt: &[3], forbidden: &[0], ..row(params) };
            assert!(matches!(one(&mut device, &[0.0; 3], outside), Err(DeviceError::Misuse(_))), "{name}");
        }
        assert_eq!(token(&mut device, &[0.0, 1.0], row(&GREEDY)), 1, "{name}");
    }
}

#[test]
fn a_row_that_cannot_be_sampled_fails_alone() {
    for (name, mut device) in devices("failures") {
        let logits = tensor(&mut device, 3, &[0.0, 2.0, 1.0, 5.0, 4.0, 3.0]);
        let all = SampleRow { forbidden: &[0, 1, 2], ..row(&GREEDY) };
        device.sample(&logits, &[(0, row(&GREEDY)), (0, all), (1, row(&GREEDY)), (2, row(&GREEDY))]).unwrap();
        let known = |token| ScoreRow { token, top: 0 };
        device.score(&logits, &[(1, known(3)), (1, known(0))]).unwrap();
        let StepResults { sampled, scores } = results(&mut device);
        let tokens: Vec<_> = sampled.iter().map(|row| row.as_ref().ok().map(|row| row.token)).collect();
        assert_eq!(tokens, [Some(1), None, Some(0), None], "{name}");
        assert_eq!(scores.iter().map(Result::is_ok).collect::<Vec<_>>(), [false, true], "{name}");
        let errors =
            sampled.into_iter().filter_map(Result::err).chain(scores.into_iter().filter_map(Result::err));
        for error in errors {
            assert!(matches!(error, DeviceError::Misuse(_)), "{name}: {error}");
        }
        // A row with a NaN gets an error of its own, too.
        let garbage = tensor(&mut device, 1, &[0.0, f32::NAN, 1.0]);
        let rows = [0, 1, 2].map(|index| (index, row(&GREEDY)));
        device.sample(&garbage, &rows).unwrap();
        device.score(&garbage, &[0, 1, 2].map(|index| (index, known(0)))).unwrap();
        let StepResults { sampled, scores } = results(&mut device);
        assert_eq!(sampled.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true], "{name}");
        assert_eq!(scores.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true], "{name}");
        assert!(matches!(sampled[1], Err(DeviceError::NotFinite(_))), "{name}");
    }
}

#[test]
fn results_belong_to_their_step() {
    let mut device = CpuDevice::new(1, Isa::detect()).unwrap();
    let logits = tensor(&mut device, 2, &[0.0, 2.0, 1.0, 0.0]);
    let (mut planes, mut out) = (device.planes(&PlanesShape::default()).unwrap(), StepResults::default());
    // A step that is not ended leaves nothing behind.
    try_begin(&mut device, &mut planes, &[], &[], &[]).unwrap();
    device.sample(&logits, &[(0, row(&GREEDY))]).unwrap();
    try_begin(&mut device, &mut planes, &[], &[], &[]).unwrap();
    device.sample(&logits, &[(1, row(&GREEDY))]).unwrap();
    let mut first = device.end_step().unwrap();
    try_begin(&mut device, &mut planes, &[], &[], &[]).unwrap();
    device.sample(&logits, &[(0, row(&GREEDY)), (1, row(&GREEDY))]).unwrap();
    // The first step is collected while the second is enqueued.
    assert!(device.collect(&mut first, None, &mut out).unwrap());
    let mut second = device.end_step().unwrap();
    assert!(device.collect(&mut second, None, &mut out).unwrap());
    let tokens: Vec<_> = out.sampled.iter().map(|row| row.as_ref().unwrap().token).collect();
    assert_eq!(tokens, [0, 1, 0]);
    assert!(device.collect(&mut second, None, &mut out).unwrap());
    assert_eq!(out.sampled.len(), 3, "results come once");
    assert_eq!(device.limits().steps_in_flight, 1);
}
