//! Tests of prompts longer than any table that an implementation might have: longer than windows, than the original
//! contexts of scaled rotations, and than 4,096 positions.
//!
//! With rotation, attention depends only on distances, and delta nets depend on no position. So a prompt that begins at
//! another position has the same logits, except for rounding. With a table of angles that is too short, all positions
//! past its end would be equal. With a list of keys that is too short, the tokens past its end would be lost.

use crate::common::{
    PAGE_TOKENS,
    families::{checkpoint, families},
    prompt, try_load,
};
use serde_json::{Value, json};
use tutti_kernels::{PageId, RowInputs, ScoreRow, SlotCopy, SlotId, StepInputs};
use tutti_models::{LoadFormat::Dummy, LogitRequests, LogitResults, Model};

/// Number of tokens of a prompt.
const TOKENS: usize = 4_200;
/// A position past the end of a table that is too short. A prompt that begins here must have the same logits as at 0.
const FAR: usize = 20_000;
/// Number of tokens, at the end of the prompt, whose distributions are compared.
const COMPARED: usize = 4;
/// Tokens per step.
const CHUNK: usize = 1_024;
/// Maximum difference of logprobs. Angles are products in f32, whose error grows with the position.
const TOLERANCE: f32 = 5e-3;

fn load(config: &Value) -> Box<dyn Model> {
    let dir = checkpoint(config, json!({"max_position_embeddings": 65_536}));
    let mut model = try_load(dir.path(), Dummy).unwrap();
    model.allocate_planes(2 + TOKENS.div_ceil(PAGE_TOKENS), 2).unwrap();
    model
}

/// Returns the logprobs of the whole vocabulary after the last [`COMPARED`] tokens. `position` gives the position of a
/// token.
fn last_logprobs(model: &mut dyn Model, tokens: &[u32], position: impl Fn(usize) -> usize) -> Vec<f32> {
    let vocab = model.limits().vocab_size;
    let has_slots = model.declaration().has_slots();
    let pages: Vec<PageId> = (1..=tokens.len().div_ceil(PAGE_TOKENS) as u32).rev().map(PageId).collect();
    let mut logprobs = Vec::new();
    for start in (0..tokens.len()).step_by(CHUNK) {
        let ids = &tokens[start..tokens.len().min(start + CHUNK)];
        let positions: Vec<f32> = (start..start + ids.len()).map(|token| position(token) as f32).collect();
        let compared = (tokens.len() - COMPARED).max(start)..start + ids.len();
        let logit_rows: Vec<usize> = compared.map(|token| token - start).collect();
        let row = RowInputs {
            first_token: 0,
            tokens: ids.len(),
            start,
            slot: SlotId(1),
            continues: false,
            block_table: &pages,
        };
        let begin = [SlotCopy { from: SlotId::NULL, to: SlotId(1) }];
        let inputs = StepInputs {
            token_ids: ids,
            positions: [&positions[..]; 3],
            rows: &[row],
            copies: if has_slots && start == 0 { &begin } else { &[] },
            logit_rows: &logit_rows,
            shape: None,
        };
        model.forward(&inputs, &[]).unwrap();
        let score: Vec<_> =
            (0..logit_rows.len()).map(|row| (row, ScoreRow { token: 0, top: vocab as u32 })).collect();
        let mut out = LogitResults::default();
        model.read_logits(&LogitRequests { sample: &[], score: &score }, &mut out).unwrap();
        for score in out.scores {
            let mut by_token = vec![f32::NAN; vocab];
            score.unwrap().top.into_iter().for_each(|(token, logprob)| by_token[token as usize] = logprob);
            logprobs.extend(by_token);
        }
    }
    assert_eq!(logprobs.len(), COMPARED * vocab);
    logprobs
}

fn greatest_difference(a: &[f32], b: &[f32]) -> f32 {
    let difference = |(a, b): (&f32, &f32)| (a - b).abs();
    a.iter()
        .zip(b)
        .map(difference)
        .fold(0.0, |greatest, x| if x.is_nan() { f32::INFINITY } else { greatest.max(x) })
}

#[test]
fn a_long_prompt_has_the_same_logits_wherever_it_begins() {
    let tokens = prompt(TOKENS);
    for (family, config) in families() {
        let mut model = load(&config);
        let near = last_logprobs(&mut *model, &tokens, |token| token);
        let far = last_logprobs(&mut *model, &tokens, |token| FAR + token);
        let difference = greatest_difference(&near, &far);
        assert!(difference <= TOLERANCE, "{family}: {difference} from position {FAR} on");
        // Control: the comparison notices if all positions are equal, as they would be past the end of a table.
        let alike = last_logprobs(&mut *model, &tokens, |_| FAR);
        let difference = greatest_difference(&near, &alike);
        assert!(difference > 2.0 * TOLERANCE, "{family}: only {difference} at one position");
    }
}

/// If all layers have windows, the last token depends only on the tokens within the sum of all windows.
#[test]
fn windows_forget_what_is_far_behind_in_a_long_prompt() {
    let (_, config) = families().into_iter().find(|(family, _)| *family == "mistral").unwrap();
    let mut model = load(&config);
    let tokens = prompt(TOKENS);
    let whole = last_logprobs(&mut *model, &tokens, |token| token);
    let reach = 2 * (16 - 1) + COMPARED;
    let first = TOKENS - reach;
    let end = last_logprobs(&mut *model, &tokens[first..], |token| first + token);
    let difference = greatest_difference(&whole, &end);
    assert!(difference <= 1e-4, "{difference}");
    let shorter =
        last_logprobs(&mut *model, &tokens[first + COMPARED + 4..], |token| first + COMPARED + 4 + token);
    assert!(greatest_difference(&whole, &shorter) > 1e-3, "the windows are all that counts");
}
