//! Tests that sampling in a group, from the ranks' best tokens, gives the same tokens as sampling from the whole rows.

use tutti_kernels::{
    DeviceError, GatheredRows, LogitBias, Nomination, SampleRow, Sampled, SamplingParams, StepResults,
    TokenMask, TokenScore,
};

use super::{Rank, RankCase, ranks};
use crate::support::{Families, Random, cpus, cuda, results, tensor, values};

static GREEDY: SamplingParams = SamplingParams::GREEDY;
/// Number of rows of logits.
const ROWS: usize = 5;

/// Returns parameters of all kinds that allow nominations, and of some that do not, for a vocabulary of `width`.
fn kinds(width: usize) -> Vec<SamplingParams> {
    let warm = SamplingParams { temperature: 0.9, top_k: 9, ..GREEDY.clone() };
    let last = width as u32 - 1;
    // Among many tokens, a bias decides only if it is large. The second token is the first one of a slice.
    let bias = match width {
        0..=4096 => vec![(0, 2.5), (last / 2, 1.5), (last / 2 + 1, -9.0), (last, 3.0)],
        _ => vec![(0, 25.0), (last / 3 + 1, 20.0), (last / 2, 15.0), (last / 2 + 1, -90.0), (last, 30.0)],
    };
    let bias: Vec<LogitBias> = bias.into_iter().map(LogitBias::from).collect();
    let mut kinds = vec![
        GREEDY.clone(),
        SamplingParams { logit_bias: bias.clone(), ..GREEDY.clone() },
        SamplingParams { repetition_penalty: 1.4, ..GREEDY.clone() },
        SamplingParams { presence_penalty: 0.8, frequency_penalty: 0.3, ..GREEDY.clone() },
        warm.clone(),
        SamplingParams { top_k: 1, ..warm.clone() },
        SamplingParams { top_k: 256, temperature: 2.0, ..warm.clone() },
        // At this temperature, most weights are 0, and equal weights are ordered by id.
        SamplingParams { top_k: 40, temperature: 0.03, ..warm.clone() },
        SamplingParams { top_p: 0.6, min_p: 0.05, ..warm.clone() },
        SamplingParams { top_k: 31, logit_bias: bias, repetition_penalty: 0.8, ..warm.clone() },
        SamplingParams { frequency_penalty: -0.5, presence_penalty: 0.2, ..warm.clone() },
        // These rows are gathered whole.
        SamplingParams { top_k: 0, ..warm.clone() },
        SamplingParams { top_k: 257, ..warm.clone() },
    ];
    kinds.iter_mut().zip(0..).for_each(|(params, seed)| params.seed = seed << 33 | seed);
    kinds
}

/// All kinds of parameters at one position, in batches of `ROWS` rows.
struct Sampling {
    width: usize,
    position: u64,
    kinds: Vec<SamplingParams>,
}

/// Tokens of prompt and output to which penalties apply.
struct Tokens {
    prompt: [u32; 4],
    output: [u32; 5],
    never: [u32; 2],
    /// A mask that some rows share, and another one.
    masks: [TokenMask; 2],
}

impl Sampling {
    fn new(width: usize, position: u64) -> Self {
        Self { width, position, kinds: kinds(width) }
    }

    fn tokens(&self) -> Tokens {
        let last = self.width as u32 - 1;
        Tokens {
            prompt: [last, 0, last / 2, last / 2],
            output: [last / 3, last, last / 3, last / 3, last / 2 + 1],
            never: [last / 5, last - 1],
            masks: [3, 4].map(|every| {
                let allowed = (0..=last).filter(|token| token % every != 1);
                TokenMask::of_tokens(TokenMask::words_of(self.width), allowed)
            }),
        }
    }

    fn row<'a>(&'a self, index: usize, tokens: &'a Tokens) -> SampleRow<'a> {
        let (prompt, output) = (&tokens.prompt[..], &tokens.output[..]);
        let forbidden = if index.is_multiple_of(4) { &tokens.never[..] } else { &[] };
        let logprobs = (index % 6 == 5).then_some(3);
        SampleRow {
            params: &self.kinds[index],
            prompt,
            output,
            forbidden,
            allowed: tokens.masks.get(index % 5),
            position: self.position,
            logprobs,
        }
    }

    /// Returns the logits of the whole rows. Some of them are equal.
    fn logits(&self, batch: usize) -> Vec<f32> {
        let logits = Random::new((self.width + batch) as u64).normals(ROWS * self.width, 2.0);
        logits.iter().map(|x| (x * 16.0).round() / 16.0).collect()
    }

    fn batches(&self) -> impl Iterator<Item = (usize, Vec<usize>)> {
        let requests: Vec<usize> = (0..self.kinds.len()).collect();
        requests.chunks(ROWS).map(<[usize]>::to_vec).enumerate().collect::<Vec<_>>().into_iter()
    }

    /// Returns the tokens that one device samples from the whole rows.
    fn alone<D: Families>(&self, device: &mut D) -> StepResults {
        let tokens = self.tokens();
        for (batch, requests) in self.batches() {
            let logits = tensor(device, self.width, &self.logits(batch));
            let rows: Vec<_> = requests
                .iter()
                .enumerate()
                .map(|(row, &request)| (row, self.row(request, &tokens)))
                .collect();
            device.sample(&logits, &rows).unwrap();
        }
        results(device).unwrap()
    }
}

impl RankCase for Sampling {
    /// The step's results at rank 0, and the numbers that this rank has nominated.
    type Output = (StepResults, Vec<f32>);

    fn run<D: Families>(&self, device: &mut D) -> Self::Output {
        let group_rank = device.group_rank();
        let (ranks, tokens) = (group_rank.world_size, self.tokens());
        let (own, mut seen) = (self.width / ranks, Vec::new());
        let first = group_rank.rank * own;
        for (batch, requests) in self.batches() {
            let logits = self.logits(batch);
            let shard: Vec<f32> =
                logits.chunks(self.width).flat_map(|row| row[first..first + own].to_vec()).collect();
            let rows: Vec<_> = requests
                .iter()
                .enumerate()
                .map(|(row, &request)| (row, self.row(request, &tokens)))
                .collect();
            let nominations: Vec<(usize, Option<Nomination>)> =
                rows.iter().map(|(row, request)| (*row, request.nomination())).collect();
            let nominated: Vec<(usize, &Nomination)> =
                nominations.iter().filter_map(|(row, own)| Some((*row, own.as_ref()?))).collect();
            let whole: Vec<usize> =
                nominations.iter().filter(|(_, own)| own.is_none()).map(|(row, _)| *row).collect();

            let mut logits = tensor(device, own, &shard);
            let mut peaks = device.tensor(ROWS, 2).unwrap();
            // For some rows, there is room for more candidates than they request.
            let count = 256.min(own);
            let mut best = device.tensor(ROWS, 2 * count).unwrap();
            let mut all = device.tensor(ROWS, 2 * count * ranks).unwrap();
            let mut gathered = device.tensor(ROWS, self.width).unwrap();
            let leads = group_rank.is_leader();
            device.adjust(&mut logits, &nominated, first, &mut peaks).unwrap();
            seen.extend(values(device, &peaks));
            device.all_reduce_max(&mut peaks).unwrap();
            seen.extend(values(device, &peaks));
            device.nominate(&logits, &nominated, first, &peaks, &mut best).unwrap();
            let candidates = values(device, &best);
            nominated.iter().for_each(|(row, _)| seen.extend(&candidates[row * 2 * count..][..2 * count]));
            device.gather_columns(&best, leads.then_some(&mut all)).unwrap();
            device.gather_rows(&logits, &whole, leads.then_some(&mut gathered)).unwrap();
            if leads {
                let nominated: Vec<usize> = nominated.iter().map(|(row, _)| *row).collect();
                let gathered = GatheredRows {
                    logits: &gathered,
                    candidates: &all,
                    peaks: &peaks,
                    nominated: &nominated,
                };
                // Results are in the order of the requests. Here, this is not the order of the rows.
                let reversed: Vec<_> = rows.iter().rev().copied().collect();
                device.sample_gathered(gathered, &reversed).unwrap();
            }
        }
        (results(device).unwrap(), seen)
    }
}

#[track_caller]
fn assert_scores(got: &Option<TokenScore>, want: &Option<TokenScore>) {
    let (Some(got), Some(want)) = (got, want) else { return assert_eq!(got, want) };
    assert!((got.logprob - want.logprob).abs() < 1e-5 && got.rank == want.rank, "{got:?} for {want:?}");
    assert_eq!(got.top.len(), want.top.len());
    for (got, want) in got.top.iter().zip(&want.top) {
        assert!(got.0 == want.0 && (got.1 - want.1).abs() < 1e-5, "{got:?} for {want:?}");
    }
}

fn sampled(results: StepResults) -> Vec<Sampled> {
    results.sampled.into_iter().map(Result::unwrap).collect()
}

fn compare(rank: &Rank, width: usize, position: u64) {
    let (case, size) = (Sampling::new(width, position), rank.group_rank.world_size);
    let ((gpu, theirs), of_cpus) = rank.on_both(&case);
    let gpu = sampled(gpu);
    for ((isa, (cpu, wanted)), (_, mut device)) in of_cpus.into_iter().zip(cpus()) {
        assert_eq!(theirs.len(), wanted.len());
        for (index, (got, want)) in theirs.iter().zip(&wanted).enumerate() {
            assert_eq!(got, want, "{width} logits on {isa}: element {index} of what the rank nominates");
        }
        let cpu = sampled(cpu);
        if !rank.group_rank.is_leader() {
            assert!(gpu.is_empty() && cpu.is_empty(), "only the leader samples");
            continue;
        }
        let alone = sampled(case.alone(&mut device));
        assert_eq!((gpu.len(), cpu.len()), (alone.len(), alone.len()));
        for (_, requests) in case.batches() {
            for (index, &request) in requests.iter().enumerate() {
                let (whole, reversed) = (&alone[request], requests[requests.len() - 1 - index]);
                let what = format!("{size} ranks, {width} logits on {isa}, {:?}", case.kinds[request]);
                assert_eq!((gpu[reversed].token, cpu[reversed].token), (whole.token, whole.token), "{what}");
                assert_scores(&gpu[reversed].score, &whole.score);
            }
        }
    }
}

/// A row of 9,001 logits is divided among three thread blocks.
#[test]
fn tokens_of_one_gpu_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("nominations of one GPU") else { return };
    for width in [2046, 9001] {
        let case = Sampling::new(width, 5);
        let (got, theirs) = case.run(&mut gpu);
        let got = sampled(got);
        for (isa, mut cpu) in cpus() {
            let (_, wanted) = case.run(&mut cpu);
            assert!(theirs == wanted, "{width} logits on {isa}: the GPU nominates other tokens");
            let alone = sampled(case.alone(&mut cpu));
            assert_eq!(got.len(), alone.len());
            for (_, requests) in case.batches() {
                for (&request, &reversed) in requests.iter().zip(requests.iter().rev()) {
                    let what = format!("{width} logits on {isa}, {:?}", case.kinds[request]);
                    assert_eq!(got[reversed].token, alone[request].token, "{what}");
                    assert_scores(&got[reversed].score, &alone[request].score);
                }
            }
        }
    }
}

#[test]
fn tokens_of_two_gpus_are_those_of_the_cpu() {
    let test = "group::nominations::tokens_of_two_gpus_are_those_of_the_cpu";
    ranks(test, 2, |rank| compare(rank, 2046, 1 << 40));
}

#[test]
fn tokens_of_two_gpus_are_those_of_the_cpu_with_few_tokens() {
    let test = "group::nominations::tokens_of_two_gpus_are_those_of_the_cpu_with_few_tokens";
    ranks(test, 2, |rank| compare(rank, 8, 0));
}

#[test]
fn tokens_of_four_gpus_are_those_of_the_cpu() {
    let test = "group::nominations::tokens_of_four_gpus_are_those_of_the_cpu";
    ranks(test, 4, |rank| compare(rank, 1028, 3));
}

/// Two rows, one of which has a bad logit, or no token to sample. Rank 0 samples one of the rows from candidates.
struct Garbage {
    logit: f32,
    forbids_all: bool,
}

impl RankCase for Garbage {
    type Output = Result<StepResults, DeviceError>;

    fn run<D: Families>(&self, device: &mut D) -> Self::Output {
        let group_rank = device.group_rank();
        let (leads, first) = (group_rank.is_leader(), group_rank.rank * 10);
        let mut logits = vec![0.25; 20];
        // The bad logit is on rank 1. Rank 0 must report it.
        logits[13] = if leads || self.forbids_all { 0.25 } else { self.logit };
        let all: Vec<u32> = (0..20).collect();
        let forbidden = if self.forbids_all { &all[..] } else { &[] };
        let row = SampleRow {
            params: &GREEDY,
            prompt: &[],
            output: &[],
            forbidden: &[],
            allowed: None,
            position: 0,
            logprobs: None,
        };
        let rows = [(0, row), (1, SampleRow { forbidden, ..row })];
        let nominations = rows.map(|(_, row)| row.nomination().unwrap());
        let nominated = [(0, &nominations[0]), (1, &nominations[1])];
        let mut logits = tensor(device, 10, &logits);
        let mut peaks = device.tensor(2, 2).unwrap();
        let (mut best, mut all) = (device.tensor(2, 2).unwrap(), device.tensor(2, 4).unwrap());
        device.adjust(&mut logits, &nominated, first, &mut peaks).unwrap();
        device.all_reduce_max(&mut peaks).unwrap();
        device.nominate(&logits, &nominated, first, &peaks, &mut best).unwrap();
        device.gather_columns(&best, leads.then_some(&mut all)).unwrap();
        if leads {
            let whole = device.tensor(2, 20).unwrap();
            let gathered =
                GatheredRows { logits: &whole, candidates: &all, peaks: &peaks, nominated: &[0, 1] };
            device.sample_gathered(gathered, &rows)?;
        }
        results(device)
    }
}

/// Asserts that a row with a bad logit on rank 1 gets an error at rank 0, and that the other row does not.
fn fails_alone(rank: &Rank, logit: f32) {
    for results in rank.all_results(&Garbage { logit, forbids_all: false }) {
        let sampled = results.unwrap().sampled;
        if rank.group_rank.is_leader() {
            assert!(matches!(sampled[..], [Ok(_), Err(DeviceError::NotFinite(_))]), "{sampled:?}");
        }
    }
}

#[test]
fn a_row_with_a_nan_on_another_rank_fails_alone() {
    ranks("group::nominations::a_row_with_a_nan_on_another_rank_fails_alone", 2, |rank| {
        fails_alone(rank, f32::NAN);
    });
}

#[test]
fn a_row_with_an_infinite_logit_on_another_rank_fails_alone() {
    ranks("group::nominations::a_row_with_an_infinite_logit_on_another_rank_fails_alone", 2, |rank| {
        fails_alone(rank, f32::INFINITY);
    });
}

#[test]
fn a_row_without_a_token_fails_alone() {
    ranks("group::nominations::a_row_without_a_token_fails_alone", 2, |rank| {
        for results in rank.all_results(&Garbage { logit: 4.0, forbids_all: true }) {
            let sampled = results.unwrap().sampled;
            if !rank.group_rank.is_leader() {
                assert!(sampled.is_empty());
                continue;
            }
            assert_eq!(sampled[0].as_ref().unwrap().token, 0, "the lowest of equals");
            assert!(matches!(sampled[1], Err(DeviceError::Misuse(_))), "{sampled:?}");
        }
    });
}
