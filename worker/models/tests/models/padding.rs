//! Tests of fixed shapes: padding changes no bit of logits, sampled tokens, pages and slots, and does not write to free
//! pages and slots.
//!
//! All pages and slots start with a canary pattern of NaN. The same script of steps runs with and without shapes, and
//! the whole memory is compared after each step.
//!
//! If `GOLDEN_MODELS` is set (see tests/goldens), the comparison also runs on the checkpoints of tests/goldens.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use crate::common::{
    PAGE_TOKENS, PAGES, SLOTS, config, device,
    goldens::Case,
    group::{of_ranks, of_ranks_as, of_ranks_with_whole_experts},
    loaded_as, prompt, try_load_on, write_config,
};
use safetensors::SafeTensors;
use serde_json::json;
use tempfile::TempDir;
use tutti_kernels::{
    DeviceError, Observer, Operation, PageId, Recorder, RowInputs, SampleRow, SamplingParams, ScoreRow,
    SlotCopy, SlotId, StepInputs, StepShape,
};
use tutti_models::{
    LoadFormat::{self, Auto, Dummy},
    LogitRequests, LogitResults, Model, Quantize,
};
use tutti_settings::ChunkShapes;

/// Maximum number of tokens of a step in these scripts.
const BUDGET: usize = 96;
const OUTPUT: usize = 4;
/// Byte of the canary pattern. Floats of any type that consist of this byte are NaN.
const CANARY: u8 = 0xff;

/// A linear congruential generator of random numbers.
struct Random(u32);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 8) as usize % end
    }
}

/// Returns the smallest shapes with room for a step's tokens and logit rows. The engine chooses shapes in the same way.
fn shape_of(shapes: &ChunkShapes, tokens: usize, logit_rows: usize) -> StepShape {
    let kept = if logit_rows == 0 { 0 } else { shapes.fit(logit_rows).unwrap() };
    StepShape { tokens: shapes.fit(tokens).unwrap(), logit_rows: kept }
}

struct Request {
    tokens: Vec<u32>,
    end: usize,
    computed: usize,
    slot: SlotId,
    pages: Vec<PageId>,
}

/// Results of a step: the bits of the scores, the sampled tokens, and the contents of all pages and slots after the
/// step.
#[derive(PartialEq)]
struct After {
    scores: Vec<Vec<(u32, u32)>>,
    sampled: Vec<u32>,
    pages: Vec<u8>,
    /// The states of all slots but the null slot, which cannot be read.
    slots: Vec<Vec<u8>>,
}

fn page_ids() -> Vec<PageId> {
    (0..PAGES as u32).map(PageId).collect()
}

/// Sets all pages and slots to the canary pattern.
fn poison(model: &mut dyn Model) {
    let layout = model.page_layout();
    model.write_pages(&page_ids(), &vec![CANARY; PAGES * layout.page_bytes()]).unwrap();
    for slot in 1..SLOTS as u32 {
        model.write_slot(SlotId(slot), &vec![CANARY; layout.slot_bytes()]).unwrap();
    }
}

fn memory(model: &mut dyn Model) -> (Vec<u8>, Vec<Vec<u8>>) {
    let mut pages = Vec::new();
    model.read_pages(&page_ids(), &mut pages).unwrap();
    let slot = |slot| {
        let mut state = Vec::new();
        model.read_slot(SlotId(slot), &mut state).unwrap();
        state
    };
    (pages, (1..SLOTS as u32).map(slot).collect())
}

/// Runs prompts until their outputs are complete. In each step, a request has no row, or a row of one or several
/// tokens, at random. A step has logit rows for all its tokens, or only for rows that reach the end of their request's
/// tokens. The script depends only on `seed`. Asserts that free pages and slots keep their canaries.
fn run(model: &mut dyn Model, prompts: &[&[u32]], seed: u32, shapes: Option<&ChunkShapes>) -> Vec<After> {
    let (mut random, vocab) = (Random(seed), model.limits().vocab_size as u32);
    let has_slots = model.declaration().has_slots();
    let layout = model.page_layout();
    poison(model);
    let mut free: Vec<PageId> = page_ids().split_off(1);
    let request = |(slot, prompt): (u32, &&[u32])| {
        let end = prompt.len() + OUTPUT;
        let pages = (0..end.div_ceil(PAGE_TOKENS)).map(|_| free.remove(random.below(free.len()))).collect();
        Request { tokens: prompt.to_vec(), end, computed: 0, slot: SlotId(2 * slot), pages }
    };
    let mut requests: Vec<Request> = (1..).zip(prompts).map(request).collect();
    let mut steps = Vec::new();
    while requests.iter().any(|request| request.tokens.len() < request.end) {
        let (scores_all, mut room) = (random.below(2) == 0, BUDGET);
        let (mut rows, mut ids, mut positions, mut copies) = (vec![], vec![], vec![], vec![]);
        let (mut logit_rows, mut score, mut ends) = (vec![], vec![], vec![]);
        for (index, request) in requests.iter().enumerate() {
            let most = [0, 1, 1, 3, 17, 40, BUDGET][random.below(7)];
            let tokens = most.min(room).min(request.tokens.len() - request.computed);
            if tokens == 0 || request.tokens.len() == request.end {
                continue;
            }
            room -= tokens;
            let (first_token, start) = (ids.len(), request.computed);
            if has_slots && start == 0 {
                copies.push(SlotCopy { from: SlotId::NULL, to: request.slot });
            }
            let (slot, continues, block_table) = (request.slot, false, &request.pages[..]);
            rows.push((index, RowInputs { first_token, tokens, start, slot, continues, block_table }));
            for position in start..start + tokens {
                let next = request.tokens.get(position + 1);
                match next {
                    Some(&token) if scores_all => {
                        score.push((logit_rows.len(), ScoreRow { token, top: vocab }));
                    }
                    None => ends.push((index, logit_rows.len(), position + 1)),
                    _ => {}
                }
                if scores_all || next.is_none() {
                    logit_rows.push(ids.len());
                }
                ids.push(request.tokens[position]);
                positions.push(position as f32);
            }
        }
        if ids.is_empty() {
            continue;
        }
        let (computed, rows): (Vec<_>, Vec<_>) =
            rows.into_iter().map(|(index, row)| ((index, row.tokens), row)).unzip();
        let inputs = StepInputs {
            token_ids: &ids,
            positions: [&positions[..]; 3],
            rows: &rows,
            copies: &copies,
            logit_rows: &logit_rows,
            shape: shapes.map(|shapes| shape_of(shapes, ids.len(), logit_rows.len())),
        };
        model.forward(&inputs, &[]).unwrap();
        let drawn = SamplingParams { temperature: 0.7, seed: 3, ..SamplingParams::GREEDY };
        let likeliest = SamplingParams::GREEDY;
        let sample = |&(index, row, position): &(usize, usize, usize)| {
            // Every second request takes its likeliest token, for which the LM head has a separate code path.
            let params = if index % 2 == 0 { &drawn } else { &likeliest };
            let (prompt, position) = (&requests[index].tokens[..], position as u64);
            (
                row,
                SampleRow {
                    params,
                    prompt,
                    output: &[],
                    forbidden: &[],
                    allowed: None,
                    position,
                    logprobs: None,
                },
            )
        };
        let sample: Vec<_> = ends.iter().map(sample).collect();
        let mut out = LogitResults::default();
        model.read_logits(&LogitRequests { sample: &sample, score: &score }, &mut out).unwrap();
        let sampled: Vec<u32> = out.sampled.into_iter().map(|token| token.unwrap().token).collect();
        for (index, tokens) in computed {
            requests[index].computed += tokens;
        }
        for (&(index, ..), &token) in ends.iter().zip(&sampled) {
            requests[index].tokens.push(token);
        }
        let bits = |top: Vec<(u32, f32)>| top.into_iter().map(|(token, p)| (token, p.to_bits())).collect();
        let scores = out.scores.into_iter().map(|score| bits(score.unwrap().top)).collect();
        let (pages, slots) = memory(model);
        steps.push(After { scores, sampled, pages, slots });
    }
    let Some(After { pages, slots, .. }) = steps.last() else { return steps };
    for page in [PageId::NULL].iter().chain(&free) {
        let bytes = &pages[page.0 as usize * layout.page_bytes()..][..layout.page_bytes()];
        assert!(bytes.iter().all(|byte| *byte == CANARY), "page {} has no owner, but changed", page.0);
    }
    let owned = |slot: u32| requests.iter().any(|request| request.slot.0 == slot);
    for (slot, state) in (1..).zip(slots).filter(|(slot, _)| !owned(*slot)) {
        assert!(state.iter().all(|byte| *byte == CANARY), "slot {slot} has no owner, but changed");
    }
    steps
}

/// Returns a random list of shapes. The largest shape has room for `BUDGET` tokens.
fn random_shapes(random: &mut Random) -> ChunkShapes {
    let mut shapes: Vec<usize> = (0..random.below(5)).map(|_| 1 + random.below(BUDGET)).collect();
    shapes.push(BUDGET + [0, 1, 37][random.below(3)]);
    shapes.sort_unstable();
    shapes.dedup();
    ChunkShapes::new(shapes).unwrap()
}

/// Compares padded runs of a model with runs without padding, for fixed and for random shapes.
fn padding_changes_nothing(what: &str, model: &mut dyn Model, prompts: &[&[u32]], seeds: u32) {
    for seed in 0..seeds {
        let plain = run(model, prompts, seed, None);
        assert!(plain.iter().any(|step| !step.scores.is_empty()), "{what}: no step has scores");
        let mut random = Random(seed ^ 0x5eed);
        let shapes = [ChunkShapes::new(vec![64, 256]).unwrap(), random_shapes(&mut random)];
        for shapes in &shapes {
            let padded = run(model, prompts, seed, Some(shapes));
            assert_eq!(plain.len(), padded.len(), "{what}, seed {seed}, shapes {shapes}");
            for (step, (plain, padded)) in plain.iter().zip(&padded).enumerate() {
                let what = format!("{what}, seed {seed}, shapes {shapes}, step {step}");
                assert!(plain.sampled == padded.sampled, "{what}: other tokens");
                assert!(plain.scores == padded.scores, "{what}: other logprobs");
                assert!(plain.pages == padded.pages, "{what}: other pages");
                assert!(plain.slots == padded.slots, "{what}: other slots");
            }
        }
    }
}

fn checkpoint(config: &serde_json::Value) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), config);
    dir
}

/// Returns a Qwen3 whose vocabulary two ranks can divide.
fn dense(changes: &serde_json::Value) -> TempDir {
    let mut config = config(changes);
    config["vocab_size"] = json!(98);
    checkpoint(&config)
}

/// Returns a model with a dense layer and a layer of experts. In a large step, all experts have rows.
fn experts() -> TempDir {
    dense(&json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": true, "mlp_only_layers": [0],
    }))
}

/// Returns a Qwen3.5 whose last layer is a delta net.
fn delta_net() -> TempDir {
    checkpoint(&json!({
        "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 98, "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 24, "max_position_embeddings": 1024, "rope_theta": 1e6,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    }))
}

/// Returns a checkpoint of the test model of recurrences and attention.
fn recurrence() -> TempDir {
    checkpoint(&json!({
        "architectures": ["TuttiHybridTestForCausalLM"], "vocab_size": 98, "hidden_size": 48, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "state_size": 24,
        "max_position_embeddings": 1024, "rope_theta": 1e6, "partial_rotary_factor": 0.5,
    }))
}

fn on_one_rank(what: &str, dir: &Path, format: LoadFormat, quantize: Quantize, seeds: u32) {
    let prompts = [1, 33, 90].map(prompt);
    let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    padding_changes_nothing(what, &mut *loaded_as(dir, format, quantize), &prompts, seeds);
}

#[test]
fn of_dense_models() {
    on_one_rank("f32", dense(&json!({})).path(), Dummy, Quantize::None, 4);
    let other = json!({
        "torch_dtype": "bfloat16", "attention_bias": true, "use_sliding_window": true, "sliding_window": 16,
        "max_window_layers": 1,
    });
    on_one_rank("bf16 with windows", dense(&other).path(), Dummy, Quantize::None, 2);
    on_one_rank("int8", dense(&json!({})).path(), Dummy, Quantize::Int8, 2);
}

#[test]
fn of_experts() {
    on_one_rank("f32", experts().path(), Dummy, Quantize::None, 4);
    on_one_rank("int8", experts().path(), Dummy, Quantize::Int8, 2);
}

#[test]
fn of_delta_nets() {
    on_one_rank("f32", delta_net().path(), Dummy, Quantize::None, 4);
}

#[test]
fn of_recurrences() {
    on_one_rank("f32", recurrence().path(), Dummy, Quantize::None, 2);
}

#[test]
fn of_groups() {
    let prompts = [1, 33, 90].map(prompt);
    let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    let test = |what: &str| {
        let (what, prompts) = (what.to_owned(), &prompts);
        move |model: &mut dyn Model| padding_changes_nothing(&what, model, prompts, 1)
    };
    of_ranks(2, dense(&json!({})).path(), Dummy, test("dense"));
    of_ranks_as(2, experts().path(), Dummy, Quantize::None, test("experts"));
    of_ranks_with_whole_experts(2, experts().path(), Dummy, Quantize::None, test("whole experts"));
    of_ranks(2, delta_net().path(), Dummy, test("delta net"));
}

/// Compares padded and plain runs of the checkpoints of tests/goldens, with their own prompts.
#[test]
fn of_goldens() {
    let Some(root) = std::env::var_os("GOLDEN_MODELS").map(PathBuf::from) else {
        eprintln!("skipped: GOLDEN_MODELS is not set");
        return;
    };
    for model in ["qwen3", "qwen3_moe", "qwen3_5"] {
        let dir = root.join(model);
        let bytes = std::fs::read(dir.join("goldens.safetensors")).unwrap();
        let goldens = SafeTensors::deserialize(&bytes).unwrap();
        let prompts = [1, 37, 125].map(|length| Case::read(&goldens, length).prompt);
        let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        padding_changes_nothing(model, &mut *loaded_as(&dir, Auto, Quantize::None), &prompts, 1);
        of_ranks(2, &dir, Auto, |group| padding_changes_nothing(model, group, &prompts, 1));
    }
}

/// Compares padded and plain runs of quantised checkpoints, whose activations have eight bits where weights have four.
#[test]
fn of_quantised_checkpoints() {
    let Some(root) = std::env::var_os("QUANTISED_FORMATS").map(PathBuf::from) else {
        eprintln!("skipped: QUANTISED_FORMATS is not set");
        return;
    };
    for model in ["qwen3-fp8_blocks", "llama3-w4_group", "qwen3-w4_group_asym", "qwen3_moe-w8a8"] {
        on_one_rank(model, &root.join("goldens").join(model), Auto, Quantize::None, 1);
    }
}

/// Records the number of rows of each operation.
struct Rows(Arc<Mutex<Vec<(&'static str, usize)>>>);

impl Observer for Rows {
    fn observe<T>(
        &mut self,
        operation: &Operation,
        run: impl FnOnce() -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        self.0.lock().unwrap().push((operation.name, operation.rows));
        run()
    }
}

/// Asserts that each operation of the layers has a declared shape. A device could thus be compiled for these shapes
/// only.
#[test]
fn every_operation_of_the_layers_has_a_declared_number_of_rows() {
    let shapes = ChunkShapes::new(vec![8, 24, 64]).unwrap();
    for dir in [dense(&json!({})), experts(), delta_net(), recurrence()] {
        let rows = Arc::new(Mutex::new(Vec::new()));
        let recorder = Recorder::new(device(), Rows(Arc::clone(&rows)));
        let mut model = try_load_on(recorder, dir.path(), Dummy).unwrap();
        model.allocate_planes(PAGES, SLOTS).unwrap();
        for (tokens, logit_rows) in [(1, 1), (9, 0), (24, 3), (25, 25), (64, 9)] {
            rows.lock().unwrap().clear();
            let positions: Vec<f32> = (0..tokens).map(|position| position as f32).collect();
            let pages: Vec<PageId> = (1..8).map(PageId).collect();
            let (first_token, start, slot, continues, block_table) = (0, 0, SlotId(1), false, &pages[..]);
            let inputs = StepInputs {
                token_ids: &prompt(tokens),
                positions: [&positions[..]; 3],
                rows: &[RowInputs { first_token, tokens, start, slot, continues, block_table }],
                copies: &[],
                logit_rows: &(tokens - logit_rows..tokens).collect::<Vec<_>>(),
                shape: Some(shape_of(&shapes, tokens, logit_rows)),
            };
            model.forward(&inputs, &[]).unwrap();
            let rows = rows.lock().unwrap();
            assert!(rows.len() > 10);
            for (name, rows) in rows.iter() {
                assert!(shapes.iter().any(|shape| shape == *rows), "{name}: {rows} rows of {tokens} tokens");
            }
            drop(rows);
            model.read_logits(&LogitRequests::default(), &mut LogitResults::default()).unwrap();
        }
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused_before_anything_runs() {
    let mut model = loaded_as(dense(&json!({})).path(), Dummy, Quantize::None);
    poison(&mut *model);
    let before = memory(&mut *model);
    let most = model.limits().max_step_tokens;
    for (tokens, logit_rows, why) in [
        (3, 1, "4 tokens and 2 logit rows in a shape of 3 and 1"),
        (8, 1, "4 tokens and 2 logit rows in a shape of 8 and 1"),
        (8, 9, "4 tokens and 2 logit rows in a shape of 8 and 9"),
        (most + 1, 2, "the limit is"),
    ] {
        let block_table = &[PageId(1)];
        let row =
            RowInputs { first_token: 0, tokens: 4, start: 0, slot: SlotId(1), continues: false, block_table };
        let inputs = StepInputs {
            token_ids: &prompt(4),
            positions: [&[0.0, 1.0, 2.0, 3.0]; 3],
            rows: &[row],
            copies: &[],
            logit_rows: &[1, 3],
            shape: Some(StepShape { tokens, logit_rows }),
        };
        match model.forward(&inputs, &[]) {
            Err(DeviceError::Misuse(text)) => assert!(text.contains(why), "{text}"),
            other => panic!("{other:?}"),
        }
        assert!(memory(&mut *model) == before, "{why}");
    }
}
