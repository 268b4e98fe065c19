//! The model whose layers keep state in slots: neither chunks, batch-mates, preemption, a restored prefix nor a hand-over
//! change a bit, alone and in a TP group.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use common::{
    Bits, Request, bits, generate, group::of_ranks, loaded, prompt, requests, step, step_with, write_config,
};
use serde_json::json;
use tutti_kernels::{PageId, SlotCopy, SlotId};
use tutti_models::{LoadFormat::Dummy, Model};

const PROMPT: usize = 40;
const OUTPUT: usize = 8;

fn checkpoint() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({
        "architectures": ["TuttiHybridTestForCausalLM"], "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "state_size": 24,
        "max_position_embeddings": 1024, "rope_theta": 1e6, "partial_rotary_factor": 0.5,
    });
    write_config(dir.path(), &config);
    dir
}

fn ids(tokens: usize) -> Vec<u32> {
    prompt(tokens).iter().map(|token| token % 96).collect()
}

/// Runs a request until it has all its output, in chunks.
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

/// A request of the usual prompt, and its outcome undisturbed.
fn alone(model: &mut dyn Model) -> (Request, Bits) {
    let fresh = requests(&[&ids(PROMPT)]).remove(0);
    let mut request = fresh.clone();
    go_on(model, &mut request, usize::MAX);
    (fresh, outcome(&request))
}

#[test]
fn neither_chunks_nor_mates_change_a_bit() {
    let dir = checkpoint();
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

#[test]
fn ranks_agree_and_chunks_change_no_bit_in_a_group() {
    let dir = checkpoint();
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

/// A preempted request, or one whose worker was lost, is computed again with its output as a part of its prompt: in
/// another slot, in other pages, with state of an earlier request in both.
#[test]
fn preemption_and_replay_change_no_bit() {
    let dir = checkpoint();
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
                // Scored again: the prompt, and the output before the preemption.
                assert!(request.scores.len() >= scores.len());
                assert!(outcome(&request) == whole, "{ranks} ranks, stopped at {stop}");
            }
        });
    }
}

/// A checkpoint is saved at the head of the step after its last token, while another request runs, and restored for a
/// request that shares the pages before it.
#[test]
fn a_prefix_with_a_checkpoint_changes_no_bit() {
    const SHARED: usize = 32;
    let dir = checkpoint();
    for ranks in [1, 2] {
        of_ranks(ranks, dir.path(), Dummy, |model| {
            let (fresh, whole) = alone(model);
            let (own, checkpoint) = (fresh.slot, SlotId(12));
            let mut first = fresh.clone();
            step(model, std::slice::from_mut(&mut first), SHARED);
            let save = SlotCopy { from: own, to: checkpoint };
            step_with(model, std::slice::from_mut(&mut first), usize::MAX, &[save]);
            go_on(model, &mut first, 1);
            assert!(outcome(&first) == whole, "{ranks} ranks: a save changes its request");

            let mut second = fresh.clone();
            second.slot = SlotId(5);
            second.computed = SHARED;
            second.pages[SHARED / 16..].iter_mut().for_each(|page| page.0 -= 100);
            let restore = |from| SlotCopy { from, to: SlotId(5) };
            step_with(model, std::slice::from_mut(&mut second), 3, &[restore(checkpoint)]);
            go_on(model, &mut second, usize::MAX);
            let (tokens, scores) = outcome(&second);
            // The shared tokens are not scored again.
            assert_eq!(tokens, whole.0, "{ranks} ranks");
            assert!(scores == whole.1[SHARED..], "{ranks} ranks");

            // Another state gives other results, so the test would notice a wrong one.
            let mut wrong = fresh.clone();
            wrong.slot = SlotId(5);
            wrong.computed = SHARED;
            step_with(model, std::slice::from_mut(&mut wrong), usize::MAX, &[restore(SlotId::NULL)]);
            go_on(model, &mut wrong, usize::MAX);
            assert!(outcome(&wrong).1 != whole.1[SHARED..], "{ranks} ranks");
        });
    }
}

#[test]
fn a_group_of_any_size_goes_on_where_another_stopped() {
    let dir = checkpoint();
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
