//! Tests that sampling in a TP group from the ranks' best tokens gives the same tokens as sampling from whole rows, and
//! that the ranks send few bytes for any size of the vocabulary.

use std::{
    path::Path,
    sync::{Arc, atomic::Ordering},
};

use crate::common::{
    config,
    group::{Traffic, of_ranks, of_ranks_counted},
    tensors, write_config, write_tensors,
};
use serde_json::json;
use tutti_kernels::{
    DeviceError, PageId, RowInputs, SampleRow, SamplingParams, ScoreRow, SlotId, StepInputs, TokenMask,
};
use tutti_models::{
    LoadFormat::{Auto, Dummy},
    LogitRequests, LogitResults, Model,
};

const VOCABULARY: usize = 960;
const WORDS: usize = VOCABULARY / 32;
/// Number of logit rows of a step: more than two blocks of rows (see `decoder/logits.rs`).
const ROWS: usize = 70;

/// Returns a checkpoint whose LM head has each row about 16 times, so that tokens of different ranks have equal logits.
fn with_ties() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut tensors = tensors();
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let value = |i: usize| ((i * 37 + name.len() * 11) % 61) as f32 / 61.0 - 0.5;
        let bytes = (0..VOCABULARY * 48).flat_map(|i| value(i).to_le_bytes()).collect();
        let dtype = tensors[name].0;
        tensors.insert(name.into(), (dtype, vec![VOCABULARY, 48], bytes));
    }
    write_config(dir.path(), &config(&json!({ "vocab_size": VOCABULARY })));
    write_tensors(&dir.path().join("model.safetensors"), &tensors);
    dir
}

/// A pseudo-random number generator (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % bound
    }

    fn of(&mut self, choices: &[f32]) -> f32 {
        choices[self.below(choices.len())]
    }

    fn tokens(&mut self, most: usize) -> Vec<u32> {
        (0..self.below(most)).map(|_| self.below(VOCABULARY) as u32).collect()
    }
}

/// The sampling of one row: parameters, prompt and output so far, forbidden and allowed tokens.
#[derive(Default)]
struct Request {
    params: SamplingParams,
    prompt: Vec<u32>,
    output: Vec<u32>,
    forbidden: Vec<u32>,
    allowed: Option<TokenMask>,
}

impl Request {
    fn row(&self, position: usize) -> SampleRow<'_> {
        let Self { params, prompt, output, forbidden, allowed } = self;
        SampleRow {
            params,
            prompt,
            output,
            forbidden,
            allowed: allowed.as_ref(),
            position: position as u64,
            logprobs: None,
        }
    }

    /// Returns a plain greedy request with a probability of 1/10, else a request with random parameters.
    fn random(random: &mut Random) -> Self {
        let mut request = Self { params: SamplingParams::GREEDY, ..Self::default() };
        if random.below(10) == 0 {
            return request;
        }
        let mut bias: Vec<(u32, f32)> =
            random.tokens(8).into_iter().map(|token| (token, random.of(&[-100.0, -0.5, 1.0, 4.0]))).collect();
        bias.sort_by_key(|(token, _)| *token);
        bias.dedup_by_key(|(token, _)| *token);
        request.params = SamplingParams {
            temperature: random.of(&[0.0, 0.3, 1.0, 20.0]),
            top_k: [0, 1, 2, 7, 30, 64, 256, 300][random.below(8)],
            top_p: random.of(&[1.0, 1.0, 0.97, 0.3]),
            min_p: random.of(&[0.0, 0.0, 0.2]),
            repetition_penalty: random.of(&[1.0, 1.0, 1.5, 0.7]),
            presence_penalty: random.of(&[0.0, 0.0, 0.7]),
            frequency_penalty: random.of(&[0.0, 0.0, 0.2]),
            logit_bias: bias.into_iter().map(Into::into).collect(),
            seed: random.below(1 << 20) as u64,
        };
        (request.prompt, request.output) = (random.tokens(40), random.tokens(40));
        request.forbidden = match random.below(20) {
            0 => (0..VOCABULARY as u32).collect(),
            1 => (0..VOCABULARY as u32 - 3).collect(),
            _ => random.tokens(5),
        };
        request.allowed = match random.below(9) {
            0 => Some(TokenMask::of_tokens(WORDS, random.tokens(5))),
            1 => Some(TokenMask::of_tokens(WORDS, (0..VOCABULARY as u32).filter(|_| random.below(9) > 0))),
            2 => Some(TokenMask::new(vec![0x5555_5555; WORDS])),
            _ => None,
        };
        request
    }
}

/// Runs a step of one prompt with logit rows for all its tokens. Returns the results of the requests.
fn answers(
    model: &mut dyn Model,
    tokens: &[u32],
    sample: &[(usize, SampleRow<'_>)],
    score: &[(usize, ScoreRow)],
) -> LogitResults {
    let positions: Vec<f32> = (0..tokens.len()).map(|position| position as f32).collect();
    let pages: Vec<PageId> = (1..8).map(PageId).collect();
    let logit_rows: Vec<usize> = (0..tokens.len()).collect();
    let row = RowInputs {
        first_token: 0,
        tokens: tokens.len(),
        start: 0,
        slot: SlotId::NULL,
        continues: false,
        block_table: &pages,
    };
    let inputs = StepInputs {
        token_ids: tokens,
        positions: [&positions[..]; 3],
        rows: &[row],
        copies: &[],
        logit_rows: &logit_rows,
        shape: None,
    };
    model.forward(&inputs, &[]).unwrap();
    let mut out = LogitResults::default();
    model.read_logits(&LogitRequests { sample, score }, &mut out).unwrap();
    assert_eq!((out.sampled.len(), out.scores.len()), (sample.len(), score.len()));
    out
}

#[test]
fn candidates_and_whole_rows_give_the_same_tokens() {
    let dir = with_ties();
    for size in [2, 4] {
        of_ranks(size, dir.path(), Auto, |model| {
            let mut random = Random(0x2545_f491_4f6c_dd1d);
            let (mut nominated, mut failed) = (0, 0);
            for round in 0..40 {
                let tokens: Vec<u32> = (0..ROWS).map(|_| random.below(VOCABULARY) as u32).collect();
                let requests: Vec<_> = (0..ROWS).map(|_| Request::random(&mut random)).collect();
                let whole: Vec<_> = requests
                    .iter()
                    .enumerate()
                    .map(|(row, request)| (row, SampleRow { logprobs: Some(0), ..request.row(row) }))
                    .collect();
                let expected = answers(model, &tokens, &whole, &[]);
                // In some rounds, each row has one request. In others, some rows also have logprobs or scores, or have
                // no request.
                let mixture = random.below(3) * 4;
                let asks = |random: &mut Random| random.below(40) < mixture;
                let (mut sample, mut score) = (vec![], vec![]);
                for (row, request) in requests.iter().enumerate() {
                    if asks(&mut random) {
                        continue;
                    }
                    let logprobs = asks(&mut random).then_some(2);
                    sample.push((row, SampleRow { logprobs, ..request.row(row) }));
                    if asks(&mut random) {
                        score.push((row, ScoreRow { token: 5, top: 1 }));
                    }
                }
                nominated += sample.iter().filter(|(_, row)| row.nomination().is_some()).count();
                let found = answers(model, &tokens, &sample, &score);
                assert!(found.scores.iter().all(Result::is_ok));
                for ((row, request), found) in sample.iter().zip(&found.sampled) {
                    let token = |result: &Result<tutti_kernels::Sampled, DeviceError>| {
                        result.as_ref().map(|sampled| sampled.token).map_err(Clone::clone)
                    };
                    let expected = token(&expected.sampled[*row]);
                    assert_eq!(token(found), expected, "{size} ranks, round {round}, row {row}: {request:?}");
                    failed += usize::from(expected.is_err());
                }
            }
            assert!(nominated > 1000 && failed > 20, "{nominated} nominated, {failed} failed");
        });
    }
}

/// Alone, a rank takes the arg max of greedy rows without storing their logits, also if they have masks of few tokens,
/// of most tokens, of none, or no mask.
#[test]
fn the_likeliest_allowed_token_is_that_of_the_whole_row() {
    let dir = with_ties();
    of_ranks(1, dir.path(), Auto, |model| {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        for round in 0..20 {
            let tokens: Vec<u32> = (0..ROWS).map(|_| random.below(VOCABULARY) as u32).collect();
            let mask = |random: &mut Random| match random.below(5) {
                0 => None,
                1 => Some(TokenMask::of_tokens(WORDS, [random.below(VOCABULARY) as u32])),
                2 => Some(TokenMask::of_tokens(WORDS, random.tokens(9))),
                3 => Some(TokenMask::of_tokens(WORDS, random.tokens(600))),
                _ => {
                    Some(TokenMask::of_tokens(WORDS, (0..VOCABULARY as u32).filter(|_| random.below(9) > 0)))
                }
            };
            let request = |allowed| Request { params: SamplingParams::GREEDY, allowed, ..Request::default() };
            let requests: Vec<_> = (0..ROWS).map(|_| request(mask(&mut random))).collect();
            let rows: Vec<_> = requests.iter().enumerate().map(|(row, of)| (row, of.row(row))).collect();
            assert!(rows.iter().all(|(_, row)| row.takes_the_likeliest_allowed()));
            let whole: Vec<_> =
                rows.iter().map(|(row, of)| (*row, SampleRow { logprobs: Some(0), ..*of })).collect();
            let [found, whole] = [&rows, &whole].map(|rows| answers(model, &tokens, rows, &[]).sampled);
            for ((found, whole), request) in found.iter().zip(&whole).zip(&requests) {
                let token = |of: &Result<tutti_kernels::Sampled, DeviceError>| {
                    of.as_ref().map(|sampled| sampled.token).map_err(Clone::clone)
                };
                assert_eq!(token(found), token(whole), "round {round}: {:?}", request.allowed);
            }
        }
    });
}

/// All tiles of a step share one buffer of logits. The step has three tiles: the first and the third draw tokens, and
/// the second takes the likeliest tokens.
#[test]
fn logits_of_tiles_are_each_sampled_before_the_next_tile_takes_their_place() {
    const THREE_TILES: usize = 96;
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), &config(&json!({ "vocab_size": VOCABULARY })));
    for size in [1, 2] {
        of_ranks(size, dir.path(), Dummy, |model| {
            let tokens: Vec<u32> =
                (0..THREE_TILES as u32).map(|i| (i * 37 + 5) % VOCABULARY as u32).collect();
            let drawn = |seed| SamplingParams { temperature: 1.0, seed, ..SamplingParams::GREEDY };
            let params =
                |row| if (32..64).contains(&row) { SamplingParams::GREEDY } else { drawn(row as u64) };
            let request = |row| Request { params: params(row), ..Request::default() };
            let requests: Vec<_> = (0..THREE_TILES).map(request).collect();
            let rows: Vec<_> = requests.iter().enumerate().map(|(row, of)| (row, of.row(row))).collect();
            let sampled = |model: &mut dyn Model, rows: &[(usize, SampleRow<'_>)]| {
                let answers = answers(model, &tokens, rows, &[]).sampled;
                answers.into_iter().map(|sampled| sampled.unwrap().token).collect::<Vec<u32>>()
            };
            let alone: Vec<u32> = rows.chunks(1).flat_map(|row| sampled(model, row)).collect();
            assert!(alone[..32] != alone[64..], "the tiles can be told apart");
            assert!(sampled(model, &rows) == alone, "{size} ranks");
        });
    }
}

/// Returns the bytes that rank 0 sends for a step of rows with these parameters, minus the bytes for a step without
/// requests.
fn bytes_sent(dir: &Path, params: &SamplingParams) -> usize {
    let traffic = Arc::new(Traffic::default());
    of_ranks_counted(2, dir, Dummy, &traffic, |model| {
        let request =
            Request { params: params.clone(), prompt: vec![3; 9], output: vec![4; 9], ..Request::default() };
        let tokens = [7; ROWS];
        let rows: Vec<_> = (0..ROWS).map(|row| (row, request.row(row))).collect();
        let mut sent = |rows: &[(usize, SampleRow<'_>)]| {
            let before = traffic.gathered.load(Ordering::Relaxed);
            assert!(answers(model, &tokens, rows, &[]).sampled.iter().all(Result::is_ok));
            traffic.gathered.load(Ordering::Relaxed) - before
        };
        sent(&rows) - sent(&[])
    })
}

#[test]
fn what_is_gathered_of_a_row_does_not_grow_with_the_vocabulary() {
    let greedy = SamplingParams::GREEDY;
    let draw = SamplingParams { temperature: 1.0, top_k: 20, ..greedy.clone() };
    let penalised = SamplingParams { repetition_penalty: 1.1, presence_penalty: 0.5, ..greedy.clone() };
    // A candidate is a logit and a token id. Each row also has two numbers for its largest logits. A number has 4
    // bytes.
    let candidates = |count: usize| 4 * ROWS * (2 + 2 * count);
    for (params, expected) in [
        (&greedy, 4 * ROWS * 2),
        (&draw, candidates(32)),
        (&SamplingParams { top_k: 256, top_p: 0.9, ..draw.clone() }, candidates(256)),
        (&penalised, candidates(1)),
    ] {
        for vocabulary in [960, 9600] {
            let dir = tempfile::tempdir().unwrap();
            write_config(dir.path(), &config(&json!({ "vocab_size": vocabulary })));
            assert_eq!(bytes_sent(dir.path(), params), expected, "{vocabulary}: {params:?}");
        }
    }
    // Control: a draw from all tokens gathers all logits, and the count includes them.
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), &config(&json!({ "vocab_size": 960 })));
    let all = SamplingParams { top_k: 0, ..draw };
    assert_eq!(bytes_sent(dir.path(), &all), 4 * ROWS * 960 / 2);
}
