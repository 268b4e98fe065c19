//! Tests of the models whose layers keep state in slots, alone and in a TP group. These change no bit of the results:
//! chunks, other requests in the batch, padding, preemption, a restored prefix, and a hand-over to another worker.

use crate::common::{
    Bits, Media, Request, bits, families, generate, group::of_ranks, loaded, prompt, requests, step,
    step_with, write_config,
};
use serde_json::json;
use tempfile::TempDir;
use tutti_kernels::{PageId, SlotCopy, SlotId};
use tutti_models::{LoadFormat::Dummy, Model, PlaneStorage};

const PROMPT: usize = 40;
const OUTPUT: usize = 8;

/// Returns a checkpoint of the test model of recurrences and attention.
fn recurrence() -> TempDir {
    checkpoint(&json!({
        "architectures": ["TuttiHybridTestForCausalLM"], "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "state_size": 24,
        "max_position_embeddings": 1024, "rope_theta": 1e6, "partial_rotary_factor": 0.5,
    }))
}

/// Returns a Qwen3.5 whose last layer is a delta net. It has two key heads, so in a group of four ranks, each key head
/// is on two ranks.
fn delta_net() -> TempDir {
    checkpoint(&qwen3_5("Qwen3_5ForCausalLM"))
}

/// Returns a model of the shape of [`delta_net`], with a shared expert and routed experts in each layer.
fn experts() -> TempDir {
    checkpoint(&qwen3_5("Qwen3_5MoeForCausalLM"))
}

fn qwen3_5(architecture: &str) -> serde_json::Value {
    json!({
        "architectures": [architecture], "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 24, "max_position_embeddings": 1024, "rope_theta": 1e6,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    })
}

/// Returns a DeepSeek-V4 with layers of all kinds.
fn entries() -> TempDir {
    families::checkpoint(&families::deepseek_v4().1, json!({"vocab_size": 96}))
}

fn checkpoint(config: &serde_json::Value) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), config);
    dir
}

/// Runs each test on each model.
macro_rules! on_each_model {
    ($($test:ident),* $(,)?) => {
        mod of_recurrences { $(#[test] fn $test() { super::$test(&super::recurrence()); })* }
        mod of_delta_nets { $(#[test] fn $test() { super::$test(&super::delta_net()); })* }
        mod of_delta_nets_and_experts { $(#[test] fn $test() { super::$test(&super::experts()); })* }
        mod of_windows_with_entries { $(#[test] fn $test() { super::$test(&super::entries()); })* }
    };
}

on_each_model!(
    neither_chunks_nor_mates_change_a_bit,
    random_slices_and_padding_change_no_bit,
    ranks_agree_and_chunks_change_no_bit_in_a_group,
    preemption_and_replay_change_no_bit,
    a_prefix_with_a_snapshot_changes_no_bit,
    a_group_of_any_size_goes_on_where_another_stopped,
    every_plane_of_the_state_is_needed,
);

fn ids(tokens: usize) -> Vec<u32> {
    prompt(tokens).iter().map(|token| token % 96).collect()
}

/// Runs a request in chunks of `chunk` tokens until its output is complete.
fn go_on(model: &mut dyn Model, request: &mut Request, chunk: usize) {
    while request.tokens.len() < PROMPT + OUTPUT {
        step(model, std::slice::from_mut(request), chunk);
    }
}

fn outcome(request: &Request) -> Bits {
    let mut scores = request.scores.clone();
    scores.truncate(PROMPT - 1);
    bits(&[(request.tokens[PROMPT..].to_vec(), scores)]).remove(0)
}

/// Returns a request with a prompt of `PROMPT` tokens, and its outcome when it runs alone.
fn alone(model: &mut dyn Model) -> (Request, Bits) {
    let fresh = requests(&[&ids(PROMPT)]).remove(0);
    let mut request = fresh.clone();
    go_on(model, &mut request, usize::MAX);
    (fresh, outcome(&request))
}

fn neither_chunks_nor_mates_change_a_bit(dir: &TempDir) {
    let mut model = loaded(dir.path(), Dummy);
    assert!(model.declaration().has_slots());
    let prompts: Vec<Vec<u32>> = [1, 9, 64, 150].map(ids).into();
    let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    let alone: Vec<_> =
        prompts.iter().flat_map(|prompt| generate(&mut *model, &[prompt], usize::MAX, OUTPUT)).collect();
    let alone = bits(&alone);
    assert!(alone.windows(2).all(|pair| pair[0].0 != pair[1].0), "the outputs can be told apart");
    for chunk in [1, 7, 64, usize::MAX] {
        assert!(alone == bits(&generate(&mut *model, &prompts, chunk, OUTPUT)), "chunks of {chunk} differ");
    }
}

/// Each step computes a random number of tokens per request, and has rows of padding in the null slot and the null
/// page.
fn random_slices_and_padding_change_no_bit(dir: &TempDir) {
    let mut model = loaded(dir.path(), Dummy);
    let (_, whole) = alone(&mut *model);
    let mates = [ids(90), ids(23)];
    for seed in 0..4u32 {
        let mut draw = seed;
        let mut chunk = || {
            draw = draw.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            [1, 1, 2, 3, 5, 17][(draw >> 16) as usize % 6]
        };
        let mut all = requests(&[&mates[0], &ids(PROMPT), &mates[1]]);
        let padding = |tokens: usize| Request {
            media: Media::default(),
            tokens: ids(tokens),
            // A row of padding may have any position. Position 0 would zero a state, so `computed` is 1.
            computed: 1,
            pages: vec![PageId::NULL; 8],
            slot: SlotId::NULL,
            scores: Vec::new(),
        };
        while all[1].tokens.len() < PROMPT + OUTPUT {
            let mut rows = vec![padding(4), padding(2)];
            rows.extend(all.iter().cloned());
            step(&mut *model, &mut rows, chunk());
            all = rows.split_off(2);
        }
        assert!(outcome(&all[1]) == whole, "seed {seed}");
    }
}

/// Asserts that the loss of any single plane of the state changes the outcome. So a hand-over needs to send every
/// plane, and tests notice a hand-over that loses one.
fn every_plane_of_the_state_is_needed(dir: &TempDir) {
    let mut model = loaded(dir.path(), Dummy);
    let (fresh, whole) = alone(&mut *model);
    let mut request = fresh;
    while request.computed < 24 {
        step(&mut *model, std::slice::from_mut(&mut request), 8);
    }
    let mut state = Vec::new();
    model.read_slot(request.slot, &mut state).unwrap();
    let layout = model.page_layout();
    let (mut first, mut planes) = (0, 0);
    for plane in layout.planes.iter().filter(|plane| plane.storage == PlaneStorage::Slot) {
        let bytes: usize = plane.sections.iter().map(|section| section.units * section.unit_bytes).sum();
        let mut lost = state.clone();
        lost[first..first + bytes].fill(0);
        let mut other = request.clone();
        model.write_slot(other.slot, &lost).unwrap();
        go_on(&mut *model, &mut other, 7);
        assert!(outcome(&other) != whole, "{} is not needed", plane.name);
        (first, planes) = (first + bytes, planes + 1);
    }
    assert!(first == state.len() && planes > 0);
    model.write_slot(request.slot, &state).unwrap();
    go_on(&mut *model, &mut request, 7);
    assert!(outcome(&request) == whole);
}

fn ranks_agree_and_chunks_change_no_bit_in_a_group(dir: &TempDir) {
    let prompts = [ids(9), ids(PROMPT)];
    let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    let run =
        |ranks, chunk| of_ranks(ranks, dir.path(), Dummy, |model| generate(model, &prompts, chunk, OUTPUT));
    let one = run(1, usize::MAX);
    for ranks in [2, 4] {
        let whole = run(ranks, usize::MAX);
        assert!(one.iter().zip(&whole).all(|(one, many)| one.0 == many.0), "{ranks} ranks");
        assert!(bits(&run(ranks, 7)) == bits(&whole), "{ranks} ranks, chunks");
    }
}

/// A preempted request, or a request of a lost worker, is computed again with its output appended to its prompt. It
/// gets another slot and other pages, which still hold the data of an earlier request.
fn preemption_and_replay_change_no_bit(dir: &TempDir) {
    for ranks in [1, 2] {
        of_ranks(ranks, dir.path(), Dummy, |model| {
            let (fresh, whole) = alone(model);
            for (stop, chunk) in [(17, 5), (PROMPT, 64), (PROMPT + 3, 1)] {
                let mut request = fresh.clone();
                while request.computed < stop {
                    step(model, std::slice::from_mut(&mut request), chunk);
                }
                let scores = std::mem::take(&mut request.scores);
                request.computed = 0;
                request.slot = SlotId(9);
                request.pages.iter_mut().for_each(|page| page.0 -= 100);
                go_on(model, &mut request, 11);
                // The prompt and the output before the preemption are scored again.
                assert!(request.scores.len() >= scores.len());
                assert!(outcome(&request) == whole, "{ranks} ranks, stopped at {stop}");
            }
        });
    }
}

/// A snapshot of the state after the shared tokens is saved at the beginning of the request's next step. Then the
/// snapshot is restored for a request that shares the pages of these tokens.
fn a_prefix_with_a_snapshot_changes_no_bit(dir: &TempDir) {
    for (ranks, shared) in [(1, 16), (1, 32), (2, 16), (2, 32)] {
        of_ranks(ranks, dir.path(), Dummy, |model| {
            let (fresh, whole) = alone(model);
            let (own, snapshot) = (fresh.slot, SlotId(12));
            let mut first = fresh.clone();
            step(model, std::slice::from_mut(&mut first), shared);
            let save = SlotCopy { from: own, to: snapshot };
            step_with(model, std::slice::from_mut(&mut first), usize::MAX, &[save]);
            go_on(model, &mut first, 1);
            assert!(outcome(&first) == whole, "{ranks} ranks, {shared} tokens: a save changes its request");

            // The poison represents the state of an earlier request in the slot.
            let poison = vec![0xff; model.page_layout().slot_bytes()];
            model.write_slot(SlotId(5), &poison).unwrap();
            let mut second = fresh.clone();
            second.slot = SlotId(5);
            second.computed = shared;
            second.pages[shared / 16..].iter_mut().for_each(|page| page.0 -= 100);
            let restore = |from| SlotCopy { from, to: SlotId(5) };
            step_with(model, std::slice::from_mut(&mut second), 3, &[restore(snapshot)]);
            go_on(model, &mut second, usize::MAX);
            let (tokens, scores) = outcome(&second);
            // The shared tokens are not scored again.
            assert_eq!(tokens, whole.0, "{ranks} ranks, {shared} tokens");
            assert!(scores == whole.1[shared..], "{ranks} ranks, {shared} tokens");

            // Control: a zero state in place of the snapshot gives other results.
            let mut wrong = fresh.clone();
            wrong.slot = SlotId(5);
            wrong.computed = shared;
            step_with(model, std::slice::from_mut(&mut wrong), usize::MAX, &[restore(SlotId::NULL)]);
            go_on(model, &mut wrong, usize::MAX);
            assert!(outcome(&wrong).1 != whole.1[shared..], "{ranks} ranks, {shared} tokens");
        });
    }
}

fn a_group_of_any_size_goes_on_where_another_stopped(dir: &TempDir) {
    for from in [1, 2, 4] {
        let (pages, state, request, whole) = of_ranks(from, dir.path(), Dummy, |model| {
            let (fresh, whole) = alone(model);
            let mut request = fresh;
            while request.tokens.len() == PROMPT {
                step(model, std::slice::from_mut(&mut request), 24);
            }
            let (mut pages, mut state) = (Vec::new(), Vec::new());
            model.read_pages(&request.pages[..PROMPT.div_ceil(16)], &mut pages).unwrap();
            model.read_slot(request.slot, &mut state).unwrap();
            assert_eq!(state.len(), model.page_layout().slot_bytes());
            (pages, state, request, whole)
        });
        for to in [1, 2, 4] {
            of_ranks(to, dir.path(), Dummy, |model| {
                let mut request = request.clone();
                request.pages.iter_mut().for_each(|page| page.0 -= 100);
                request.slot = SlotId(7);
                let own: Vec<PageId> = request.pages[..PROMPT.div_ceil(16)].to_vec();
                model.write_pages(&own, &pages).unwrap();
                model.write_slot(request.slot, &state).unwrap();
                let mut back = Vec::new();
                model.read_slot(request.slot, &mut back).unwrap();
                assert!(back == state, "{from} to {to} ranks: other bytes");
                go_on(model, &mut request, 1);
                assert_eq!(request.tokens[PROMPT..], whole.0, "{from} to {to} ranks");
                if from == to {
                    assert!(outcome(&request) == whole, "{from} to {to} ranks");
                }
            });
        }
    }
}
