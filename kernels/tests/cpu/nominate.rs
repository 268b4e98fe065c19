//! Tests that sampling from the tokens that each rank of a TP group nominates gives the same tokens and the same errors
//! as sampling from all logits.

use tutti_kernels::cpu::CpuDevice;
use tutti_kernels::{
    Device, DeviceError, GatheredRows, MAX_NOMINATED, Nomination, SampleRow, Sampled, Sampler,
    SamplingParams, TokenMask,
};

use crate::support::{Random, devices, results, tensor};

const ROWS: usize = 4;

/// A request to sample from one row of logits.
#[derive(Debug)]
struct Request {
    params: SamplingParams,
    prompt: Vec<u32>,
    output: Vec<u32>,
    forbidden: Vec<u32>,
    allowed: Option<TokenMask>,
    position: u64,
}

impl Request {
    fn row(&self) -> SampleRow<'_> {
        let Self { params, prompt, output, forbidden, allowed, position } = self;
        let (allowed, position) = (allowed.as_ref(), *position);
        SampleRow { params, prompt, output, forbidden, allowed, position, logprobs: None }
    }

    fn random(random: &mut Random, vocabulary: usize) -> Self {
        let pick = |random: &mut Random, choices: &[f32]| choices[random.below(choices.len())];
        let tokens = |random: &mut Random, most: usize| -> Vec<u32> {
            (0..random.below(most)).map(|_| random.below(vocabulary) as u32).collect()
        };
        let mut bias: Vec<(u32, f32)> = tokens(random, 6)
            .into_iter()
            .map(|token| (token, pick(random, &[-100.0, -1.5, 0.0, 2.0, 9.0])))
            .collect();
        bias.sort_by_key(|(token, _)| *token);
        bias.dedup_by_key(|(token, _)| *token);
        let params = SamplingParams {
            temperature: pick(random, &[0.0, 0.01, 0.7, 1.0, 3.0, 1000.0]),
            top_k: [1, 2, 3, 20, 33, 200, MAX_NOMINATED][random.below(7)],
            top_p: pick(random, &[1.0, 0.999_999_9, 0.95, 0.5, 1e-6]),
            min_p: pick(random, &[0.0, 0.0, 0.05, 0.9, 1.0]),
            repetition_penalty: pick(random, &[1.0, 1.0, 1.3, 0.5]),
            presence_penalty: pick(random, &[0.0, 0.0, 0.4, -2.0]),
            frequency_penalty: pick(random, &[0.0, 0.0, 0.3, -0.2]),
            logit_bias: bias.into_iter().map(Into::into).collect(),
            seed: random.below(1000) as u64,
        };
        let forbidden = match random.below(40) {
            0 => (0..vocabulary as u32).collect(),
            1 => vec![vocabulary as u32],
            few => tokens(random, few.min(9) + 1),
        };
        let allowed = (random.below(3) == 0).then(|| {
            let every = random.below(4) + 1;
            let allowed = (0..vocabulary as u32).filter(|_| random.below(every) == 0).collect::<Vec<_>>();
            TokenMask::of_tokens(TokenMask::words_of(vocabulary), allowed)
        });
        Self {
            allowed,
            params,
            prompt: tokens(random, 30),
            output: tokens(random, 30),
            forbidden,
            position: random.below(1000) as u64,
        }
    }
}

/// Returns logits of a random kind. Some kinds have equal logits, or different logits with equal weights. Some logits
/// are masked, NaN or infinite.
fn logits(random: &mut Random, vocabulary: usize) -> Vec<f32> {
    let kind = random.below(6);
    let mut logits: Vec<f32> = match kind {
        0 => random.normals(vocabulary, 3.0),
        1 => random.normals(vocabulary, 1.0).iter().map(|x| (x * 3.0).round()).collect(),
        2 => vec![1.5; vocabulary],
        // Adjacent f32 numbers, whose weights are equal at nearly all temperatures.
        3 => (0..vocabulary).map(|_| f32::from_bits(2f32.to_bits() + random.below(9) as u32)).collect(),
        // Logits whose weights underflow.
        4 => random.normals(vocabulary, 200.0),
        _ => random.normals(vocabulary, 0.01).iter().map(|x| (x * 1000.0).round() / 1000.0).collect(),
    };
    for _ in 0..random.below(3) * vocabulary / 2 {
        logits[random.below(vocabulary)] = f32::NEG_INFINITY;
    }
    match random.below(30) {
        0 => logits[random.below(vocabulary)] = f32::NAN,
        1 => logits[random.below(vocabulary)] = f32::INFINITY,
        2 => logits.fill(f32::NEG_INFINITY),
        _ => {}
    }
    logits
}

type Outcome = Result<Vec<Result<Sampled, DeviceError>>, DeviceError>;

/// Samples the rows from the candidates of `ranks` equal shards. Rows without a nomination get all of their logits.
/// Nominated rows get garbage instead of logits.
fn from_candidates(
    device: &mut CpuDevice,
    ranks: usize,
    whole: &[Vec<f32>],
    rows: &[(usize, SampleRow<'_>)],
    nominations: &[(usize, &Nomination)],
) -> Outcome {
    let (vocabulary, live) = (whole[0].len(), whole.len());
    let own = vocabulary / ranks;
    let count = nominations.iter().map(|(_, nomination)| nomination.count as usize).max().unwrap();
    // Some cases have room for more candidates than they need.
    let width = 2 * (count + count % 3).min(own);
    let mut shards: Vec<_> = (0..ranks)
        .map(|rank| {
            let shard: Vec<f32> = whole.iter().flat_map(|row| row[rank * own..][..own].to_vec()).collect();
            let (mut shard, mut peaks) = (tensor(device, own, &shard), device.tensor(live, 2).unwrap());
            device.adjust(&mut shard, nominations, rank * own, &mut peaks).unwrap();
            (shard, peaks)
        })
        .collect();
    let larger = |a: f32, b: f32| if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) };
    let mut highest = shards[0].1.values().to_vec();
    for (_, peaks) in &shards {
        highest.iter_mut().zip(peaks.values()).for_each(|(a, b)| *a = larger(*a, *b));
    }
    let peaks = tensor(device, 2, &highest);
    let mut columns = vec![0.0; live * ranks * width];
    for (rank, (shard, _)) in shards.iter_mut().enumerate() {
        let mut best = device.tensor(live, width).unwrap();
        device.nominate(shard, nominations, rank * own, &peaks, &mut best).unwrap();
        for (row, best) in best.values().chunks(width).enumerate() {
            columns[(row * ranks + rank) * width..][..width].copy_from_slice(best);
        }
    }
    let nominated: Vec<usize> = nominations.iter().map(|(row, _)| *row).collect();
    let gathered: Vec<f32> = whole
        .iter()
        .enumerate()
        .flat_map(|(row, logits)| match nominated.contains(&row) {
            true => vec![7.0; vocabulary],
            false => logits.clone(),
        })
        .collect();
    let (logits, candidates) =
        (tensor(device, vocabulary, &gathered), tensor(device, ranks * width, &columns));
    let gathered =
        GatheredRows { logits: &logits, candidates: &candidates, peaks: &peaks, nominated: &nominated };
    device.sample_gathered(gathered, rows)?;
    Ok(results(device).sampled)
}

#[test]
fn candidates_give_the_tokens_of_whole_rows() {
    for (name, mut device) in devices("nominate") {
        let mut random = Random::new(77);
        let (mut sampled, mut failed, mut not_finite, mut truncated) = (0, 0, 0, 0);
        for round in 0..300 {
            let ranks = 1 + random.below(4);
            let vocabulary = ranks * [1, 5, 40, 300, 1100][random.below(5)];
            let requests: Vec<_> = (0..ROWS).map(|_| Request::random(&mut random, vocabulary)).collect();
            let whole: Vec<_> = (0..ROWS).map(|_| logits(&mut random, vocabulary)).collect();
            let rows: Vec<_> = requests.iter().map(Request::row).enumerate().collect();
            let tensor = tensor(&mut device, vocabulary, &whole.concat());
            for row in &rows {
                // Each row is sampled alone here, and all rows together below.
                let rows = [*row];
                let expected = device.sample(&tensor, &rows).map(|()| results(&mut device).sampled);
                let nomination = row.1.nomination().unwrap();
                let nominations = [(row.0, &nomination)];
                let found = from_candidates(&mut device, ranks, &whole, &rows, &nominations);
                let request = &requests[row.0];
                assert_eq!(found, expected, "{name}, round {round}, {ranks} × {vocabulary}: {request:?}");
                match &expected {
                    Ok(results) if matches!(results[0], Err(DeviceError::NotFinite(_))) => not_finite += 1,
                    Ok(results) if results[0].is_err() => failed += 1,
                    Ok(_) => sampled += 1,
                    Err(error) => panic!("{name}, round {round}: {error}"),
                }
                truncated += usize::from((nomination.count as usize) < vocabulary);
            }
            let expected = device.sample(&tensor, &rows).map(|()| results(&mut device).sampled);
            let nominations: Vec<_> = rows
                .iter()
                .filter(|_| random.below(4) > 0)
                .map(|(index, row)| (*index, row.nomination().unwrap()))
                .collect();
            let nominations: Vec<_> = nominations.iter().map(|(row, of)| (*row, of)).collect();
            if !nominations.is_empty() {
                let found = from_candidates(&mut device, ranks, &whole, &rows, &nominations);
                assert_eq!(found, expected, "{name}, round {round}, some of {ROWS} rows nominated");
            }
        }
        assert!(
            sampled > 500 && failed > 20 && not_finite > 20 && truncated > 500,
            "{sampled} {failed} {not_finite}"
        );
    }
}

/// At a high temperature, different logits can have equal weights. The best of such tokens are those with the lowest
/// ids, whatever their logits.
#[test]
fn tokens_of_equal_weight_are_nominated_by_id() {
    for (name, mut device) in devices("nominate by weight") {
        let mut random = Random::new(78);
        let mut unexpected = 0;
        for round in 0..60 {
            let (ranks, top_k) = (2 + random.below(3), [1, 3, 20][random.below(3)]);
            let near_two = |random: &mut Random| f32::from_bits(2f32.to_bits() + random.below(9) as u32);
            let logits: Vec<f32> = (0..ranks * 60).map(|_| near_two(&mut random)).collect();
            let params = SamplingParams { temperature: 1000.0, top_k, seed: round, ..SamplingParams::GREEDY };
            let (prompt, output, forbidden) = (vec![], vec![], vec![]);
            let request = Request { params, prompt, output, forbidden, allowed: None, position: 3 };
            let (rows, nomination) = ([(0, request.row())], request.row().nomination().unwrap());
            let whole = tensor(&mut device, logits.len(), &logits);
            device.sample(&whole, &rows).unwrap();
            let expected = results(&mut device).sampled;
            let token = expected[0].as_ref().unwrap().token as usize;
            let larger = logits.iter().filter(|logit| **logit > logits[token]).count();
            unexpected += usize::from(larger >= top_k as usize);
            let found = from_candidates(&mut device, ranks, &[logits], &rows, &[(0, &nomination)]);
            assert_eq!(found, Ok(expected), "{name}, round {round}");
        }
        assert!(unexpected > 20, "{name}: in {unexpected} rounds the largest logits are not the best");
    }
}

#[test]
fn rows_that_depend_on_more_than_their_best_tokens_are_not_nominated() {
    fn row(params: &SamplingParams) -> SampleRow<'_> {
        let (prompt, output) = (&[1, 1, 2], &[2, 3, 2]);
        SampleRow { params, prompt, output, forbidden: &[], allowed: None, position: 0, logprobs: None }
    }
    let greedy = SamplingParams::GREEDY;
    let draw = SamplingParams { temperature: 1.0, top_k: 5, ..greedy.clone() };
    assert_eq!(row(&greedy).nomination(), Some(Nomination::LIKELIEST));
    assert_eq!(row(&draw).nomination().map(|nomination| nomination.count), Some(5));
    for top_k in [0, MAX_NOMINATED + 1] {
        assert_eq!(row(&SamplingParams { top_k, ..draw.clone() }).nomination(), None);
    }
    assert_eq!(SampleRow { logprobs: Some(0), ..row(&draw) }.nomination(), None);
    let penalised = SamplingParams {
        repetition_penalty: 1.2,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        ..greedy.clone()
    };
    let nomination = row(&penalised).nomination().unwrap();
    let adjustments = nomination.adjustments.unwrap();
    assert_eq!((nomination.count, adjustments.repeated), (1, vec![1, 2, 3]));
    assert_eq!(adjustments.counted, [(2, 2), (3, 1)]);
    let long = vec![4; 10_000];
    assert_eq!(SampleRow { prompt: &long, ..row(&penalised) }.nomination(), None);
    let nomination = SampleRow { prompt: &long, ..row(&draw) }.nomination().unwrap();
    assert_eq!(nomination.adjustments, None, "without a penalty the prompt's length does not matter");
}
