//! Tests the peak memory of the largest step, with every position scored. The file has one test, because the peak is
//! measured for the whole process.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::fs;

use common::{config, device, write_config};
use serde_json::json;
use tutti_kernels::{PageId, RowInputs, SampleRow, SamplingParams, ScoreRow, SlotId, StepInputs};
use tutti_models::{LoadFormat, LoadOptions, LogitRequests, LogitResults, Model, Quantize, load};

const VOCABULARY: usize = 151_936;
const TOKENS: usize = 2048;
const PAGE_TOKENS: usize = 16;
const TOP: u32 = 20;

/// Returns the value `name` in `/proc/self/status`, in bytes.
fn memory(name: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

/// Runs a step of `tokens` tokens. Scores all tokens but the first, and samples a token after the last.
fn step(model: &mut dyn Model, tokens: usize) -> LogitResults {
    let ids: Vec<u32> = (0..tokens as u32).collect();
    let positions: Vec<f32> = ids.iter().map(|&id| id as f32).collect();
    let pages: Vec<PageId> = (1..=tokens.div_ceil(PAGE_TOKENS) as u32).map(PageId).collect();
    let rows = [RowInputs {
        first_token: 0,
        tokens,
        start: 0,
        slot: SlotId(1),
        continues: false,
        block_table: &pages,
    }];
    let logit_rows: Vec<usize> = (0..tokens).collect();
    let inputs = StepInputs {
        token_ids: &ids,
        positions: [&positions[..]; 3],
        rows: &rows,
        copies: &[],
        logit_rows: &logit_rows,
        shape: None,
    };
    model.forward(&inputs, &[]).unwrap();

    // Penalties, truncation and a random draw need the most scratch memory.
    let params = SamplingParams {
        temperature: 1.0,
        top_k: 100_000,
        top_p: 0.999,
        repetition_penalty: 1.1,
        presence_penalty: 0.1,
        frequency_penalty: 0.1,
        ..SamplingParams::GREEDY
    };
    let position = tokens as u64;
    let sampled = SampleRow {
        params: &params,
        prompt: &ids,
        output: &ids,
        forbidden: &[],
        allowed: None,
        position,
        logprobs: Some(TOP),
    };
    let score: Vec<_> = (0..tokens - 1).map(|at| (at, ScoreRow { token: ids[at + 1], top: TOP })).collect();
    let mut out = LogitResults::default();
    model.read_logits(&LogitRequests { sample: &[(tokens - 1, sampled)], score: &score }, &mut out).unwrap();
    out
}

/// Returns configs of a dense model, of a model with state in slots, and of a model with both state and experts.
fn configs() -> [serde_json::Value; 3] {
    let dense = config(&json!({
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16",
    }));
    let mut hybrid = dense.clone();
    let changes = json!({
        "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 2, "linear_num_key_heads": 1,
        "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "full_attention_interval": 2,
    });
    hybrid.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    let mut experts = hybrid.clone();
    let changes = json!({
        "architectures": ["Qwen3_5MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    });
    experts.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    [dense, hybrid, experts]
}

#[test]
fn a_step_that_scores_all_its_tokens_stays_within_step_bytes() {
    configs().iter().for_each(stays_within_step_bytes);
}

fn stays_within_step_bytes(config: &serde_json::Value) {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), config);
    let (dir, load_format) = (dir.path().to_owned(), LoadFormat::Dummy);
    let options = LoadOptions {
        kv_cache_dtype: tutti_models::KvCacheDtype::Auto,
        dir,
        load_format,
        quantize: Quantize::None,
        max_step_tokens: TOKENS,
        page_tokens: PAGE_TOKENS,
        expert_parallel: false,
        nodes: None,
        seed: 0,
    };
    let mut model = load(&options, device(), &mut |_| {}).unwrap();
    model.allocate_planes(1 + TOKENS / PAGE_TOKENS, 2).unwrap();
    step(&mut *model, 1);
    let declared = model.step_bytes();

    // Resets the peak of the process.
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = memory("VmRSS");
    let out = step(&mut *model, TOKENS);
    let taken = memory("VmHWM") - before;

    assert_eq!((out.sampled.len(), out.scores.len()), (1, TOKENS - 1));
    let kv = model.page_bytes() * (1 + TOKENS / PAGE_TOKENS);
    let answers = TOKENS * (2 * size_of_val(&out.scores[0]) + TOP as usize * size_of::<(u32, f32)>());
    // The step is also the first to touch some pages of stacks, code and the allocator.
    let slack = 256 << 10;
    let bound = declared + (kv + answers + slack) as u64;
    assert!(
        taken <= bound,
        "{taken} bytes taken, {declared} declared before, {bound} with pages and answers"
    );
    // Control: all logits at once would take more than 8 times the bound.
    assert!(
        bound * 8 < (VOCABULARY * TOKENS * size_of::<f32>()) as u64,
        "{bound} bytes are too many to tell"
    );
}
