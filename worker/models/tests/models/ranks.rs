//! Tests of a model divided among the ranks of a TP group. Tokens are equal for any number of ranks. With the same
//! number of ranks, every run gives the same bits.

use std::{fs, path::PathBuf};

use crate::common::{
    bits, config, device, generate,
    goldens::{Case, LENGTHS, bound},
    group::{Lone, of_ranks, of_ranks_as, of_ranks_with_whole_experts},
    options, prompt, tensors, try_load_on, try_load_with, unscreened_device, write_config, write_tensors,
};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use tutti_kernels::{DeviceError, PageId, RowInputs, SlotId, StepInputs, TokenScore, collective::GroupRank};
use tutti_models::{
    LoadFormat::{self, Auto, Dummy},
    LoadOptions, LogitRequests, LogitResults, Model, Quantize,
};

/// The output tokens and the scores of several prompts.
type Runs = Vec<(Vec<u32>, Vec<TokenScore>)>;

/// Compares a model on 1, 2 and 4 ranks with its goldens.
fn agrees(model: &str) {
    agrees_on(model, &[(1, false), (2, false), (4, false)]);
}

/// Runs [`agrees`] with a share of each expert on every rank, and with whole experts.
fn agrees_with_experts(model: &str) {
    agrees_on(model, &[(1, false), (2, false), (4, false), (2, true), (4, true)]);
}

/// Compares a model with its goldens on groups of several sizes. An entry of `groups` is a number of ranks, and true if
/// each rank holds whole experts. A second run, chunks and other requests in the batch change no bit.
fn agrees_on(model: &str, groups: &[(usize, bool)]) {
    agrees_in("GOLDEN_MODELS", model, groups);
}

/// Runs [`agrees_on`] with a model below the directory that a variable names.
fn agrees_in(variable: &str, model: &str, groups: &[(usize, bool)]) {
    let Some(root) = std::env::var_os(variable).map(PathBuf::from) else {
        eprintln!("skipped: {variable} is not set");
        return;
    };
    let dir = root.join(model);
    let bytes = fs::read(dir.join("goldens.safetensors")).unwrap();
    let goldens = SafeTensors::deserialize(&bytes).unwrap();
    let cases: Vec<Case> = LENGTHS.iter().map(|&length| Case::read(&goldens, length)).collect();
    let prompts: Vec<&[u32]> = cases.iter().map(|case| &case.prompt[..]).collect();
    let output = cases[0].greedy.len();
    for &(size, whole_experts) in groups {
        let act = |act: &dyn Fn(&mut dyn Model) -> Runs| match whole_experts {
            true => of_ranks_with_whole_experts(size, &dir, Auto, Quantize::None, act),
            false => of_ranks(size, &dir, Auto, act),
        };
        let run = |chunk| act(&|model| generate(model, &prompts, chunk, output));
        let first = run(usize::MAX);
        let mut worst = 0.0f64;
        for (case, (tokens, scores)) in cases.iter().zip(&first) {
            assert_eq!(*tokens, case.greedy, "{size} ranks, a prompt of {}", case.prompt.len());
            for (i, score) in scores.iter().enumerate() {
                worst = worst.max((f64::from(score.logprob) - case.logprob(i + 1)).abs());
            }
        }
        eprintln!("{}: {size} ranks, greatest |Δ logprob| {worst:.2e}", dir.display());
        assert!(worst < bound(model), "{size} ranks: greatest deviation {worst}");
        for chunk in [usize::MAX, 1, 7, 64] {
            assert!(bits(&run(chunk)) == bits(&first), "{size} ranks: chunks of {chunk} differ");
        }
        let alone =
            act(&|model| prompts.iter().flat_map(|prompt| generate(model, &[prompt], 32, output)).collect());
        assert!(bits(&alone) == bits(&first), "{size} ranks: batch-mates make a difference");
    }
}

#[test]
fn qwen3() {
    agrees("qwen3");
}

/// The ranks hold shares of the codes and scales of checkpoints.
#[test]
fn quantised_checkpoints() {
    for model in [
        "goldens/qwen3-fp8_blocks",
        "goldens/llama3-fp8_channel",
        "goldens/llama3-w4_group16",
        "goldens/qwen3-w4_channel_asym",
        "goldens/qwen3-nvfp4",
        "goldens/llama3-gptq8",
        "goldens/qwen3-w8a8",
    ] {
        agrees_in("QUANTISED_FORMATS", model, &[(1, false), (2, false)]);
    }
    agrees_in("QUANTISED_FORMATS", "goldens/qwen3_moe-fp8_channel", &[(1, false), (2, false), (2, true)]);
}

#[test]
fn qwen3_tied() {
    agrees("qwen3_tied");
}

#[test]
fn qwen3_yarn_swa() {
    agrees("qwen3_yarn_swa");
}

#[test]
fn llama3() {
    agrees("llama3");
}

#[test]
fn smollm() {
    agrees("smollm");
}

#[test]
fn qwen2() {
    agrees("qwen2");
}

#[test]
fn mistral() {
    agrees("mistral");
}

#[test]
fn qwen3_moe() {
    agrees_with_experts("qwen3_moe");
}

#[test]
fn qwen3_moe_nonorm() {
    agrees_with_experts("qwen3_moe_nonorm");
}

#[test]
fn qwen3_embedding() {
    agrees("qwen3_embedding");
}

#[test]
fn qwen3_5() {
    agrees("qwen3_5");
}

#[test]
fn qwen3_5_text_tied() {
    agrees("qwen3_5_text_tied");
}

#[test]
fn qwen3_5_moe() {
    agrees_with_experts("qwen3_5_moe");
}

#[test]
fn qwen3_5_moe_text() {
    agrees_with_experts("qwen3_5_moe_text");
}

/// Two groups of heads are the most that ranks can divide.
#[test]
fn deepseek_v4() {
    for model in ["deepseek_v4", "v4_sliding", "v4_hca", "v4_csa_all", "v4_hash"] {
        agrees_on(model, &[(1, false), (2, false), (2, true)]);
    }
}

#[test]
fn qwen3_vl() {
    agrees("qwen3_vl");
}

#[test]
fn qwen3_vl_moe() {
    agrees_with_experts("qwen3_vl_moe");
}

#[test]
fn qwen3_omni() {
    agrees_with_experts("qwen3_omni");
}

/// Returns a checkpoint that four ranks can divide. It has two key heads, so in a group of four ranks, each key head is
/// on two ranks.
fn divisible(changes: Value) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut keys = json!({ "vocab_size": 96 });
    keys.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    write_config(dir.path(), &config(&keys));
    dir
}

fn greatest_difference(a: &[(Vec<u32>, Vec<TokenScore>)], b: &[(Vec<u32>, Vec<TokenScore>)]) -> f32 {
    let logprobs = |runs: &[(Vec<u32>, Vec<TokenScore>)]| -> Vec<f32> {
        runs.iter().flat_map(|(_, scores)| scores.iter().map(|score| score.logprob)).collect()
    };
    let differences = logprobs(a).into_iter().zip(logprobs(b)).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, f32::max)
}

#[test]
fn dummy_weights_are_the_same_model_for_any_number_of_ranks() {
    let dir = divisible(json!({"attention_bias": true}));
    let prompt: Vec<u32> = prompt(40).iter().map(|token| token % 96).collect();
    let run = |size| of_ranks(size, dir.path(), Dummy, |model| generate(model, &[&prompt], usize::MAX, 8));
    let one = run(1);
    for size in [2, 4] {
        let many = run(size);
        assert_eq!(many[0].0, one[0].0, "{size} ranks");
        assert!(greatest_difference(&many, &one) < 2e-5, "{size} ranks");
    }
}

#[test]
fn a_bias_of_a_sum_over_ranks_is_added_once() {
    // Dummy biases are zero, so the test writes biases to a checkpoint.
    let keys = json!({"attention_bias": true, "vocab_size": 97, "num_attention_heads": 4});
    let dir = tempfile::tempdir().unwrap();
    let mut tensors = tensors();
    for layer in 0..2 {
        for (projection, width) in [("q", 64), ("k", 32), ("v", 32), ("o", 48)] {
            let name = format!("model.layers.{layer}.self_attn.{projection}_proj.bias");
            let value = |i: usize| ((i * 29 + layer) % 17) as f32 / 17.0 - 0.4;
            let bytes = (0..width).flat_map(|i| value(i).to_le_bytes()).collect();
            tensors.insert(name, (safetensors::tensor::Dtype::F32, vec![width], bytes));
        }
    }
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let tensor = tensors.get_mut(name).unwrap();
        tensor.1[0] = 96;
        tensor.2.truncate(96 * 48 * 4);
    }
    let mut keys = keys;
    keys["vocab_size"] = json!(96);
    write_config(dir.path(), &config(&keys));
    write_tensors(&dir.path().join("model.safetensors"), &tensors);
    let prompt: Vec<u32> = prompt(40).iter().map(|token| token % 96).collect();
    let run = |size| of_ranks(size, dir.path(), Auto, |model| generate(model, &[&prompt], usize::MAX, 8));
    let one = run(1);
    for size in [2, 4] {
        assert!(greatest_difference(&run(size), &one) < 2e-5, "{size} ranks");
    }
}

#[test]
fn a_rank_holds_its_share_and_nothing_more() {
    let dir = divisible(json!({}));
    let bytes = |rank, size| {
        let device = unscreened_device().with_group(Box::new(Lone(GroupRank { rank, world_size: size })));
        try_load_on(device, dir.path(), Dummy).unwrap().weight_bytes()
    };
    let (whole, norms) = (bytes(0, 1), 4 * (2 * (2 * 48 + 2 * 16) + 48));
    assert_eq!(bytes(0, 2), (whole - norms) / 2 + norms);
    // Each of four ranks holds one of two key heads, which is half of the key and value projections.
    let keys_and_values = 4 * 2 * 2 * 32 * 48;
    assert_eq!(bytes(3, 4), (whole - norms - keys_and_values) / 4 + keys_and_values / 2 + norms);
}

#[test]
fn a_number_of_ranks_that_leaves_remainders_is_refused_by_the_key_and_the_limit() {
    for (changes, size, expected) in [
        (json!({}), 3, "num_attention_heads: 4 is not a multiple of tp, which is 3"),
        (json!({"vocab_size": 97}), 2, "vocab_size: 97 is not a multiple of tp, which is 2"),
        (json!({"intermediate_size": 81}), 2, "intermediate_size: 81 is not a multiple of tp, which is 2"),
        (
            json!({"num_attention_heads": 12, "num_key_value_heads": 6}),
            4,
            "num_key_value_heads: 6 is neither a multiple nor a divisor of tp, which is 4",
        ),
    ] {
        let dir = divisible(changes);
        let device = device().with_group(Box::new(Lone(GroupRank { rank: 0, world_size: size })));
        let error = try_load_on(device, dir.path(), Dummy).err().unwrap().to_string();
        assert!(error.contains(expected) && error.contains("config.json"), "{error}");
    }
}

/// Returns a function that enqueues a forward pass of one token, in the page with this id.
fn forward(token: u32, page: u32) -> impl Fn(&mut dyn tutti_models::Model) -> Result<(), DeviceError> {
    move |model| {
        let inputs = StepInputs {
            token_ids: &[token],
            positions: [&[0.0]; 3],
            rows: &[RowInputs {
                first_token: 0,
                tokens: 1,
                start: 0,
                slot: SlotId::NULL,
                continues: false,
                block_table: &[PageId(page)],
            }],
            copies: &[],
            logit_rows: &[0],
            shape: None,
        };
        model.forward(&inputs, &[])
    }
}

#[test]
fn what_the_leader_refuses_leaves_the_ranks_in_lockstep() {
    let dir = divisible(json!({}));
    of_ranks(2, dir.path(), LoadFormat::Dummy, |model| {
        let reference = generate(model, &[&[3, 4, 5]], usize::MAX, 4);
        // The first operation refuses the first of these forward passes. The first layer refuses the second.
        for bad in [forward(96, 1), forward(1, 100_000)] {
            assert!(matches!(bad(model), Err(DeviceError::Misuse(_))));
        }
        // The model refuses this step before any operation.
        let long = vec![1; model.limits().max_step_tokens + 1];
        let inputs = StepInputs {
            token_ids: &long,
            positions: [&[]; 3],
            rows: &[],
            copies: &[],
            logit_rows: &[],
            shape: None,
        };
        assert!(matches!(model.forward(&inputs, &[]), Err(DeviceError::Misuse(_))));
        // One score fails. It is in the first of three tiles of logits.
        let tokens = [1; 80];
        let positions: Vec<f32> = (0..80).map(|position| position as f32).collect();
        let pages: Vec<PageId> = (1..6).map(PageId).collect();
        let logit_rows: Vec<usize> = (0..80).collect();
        let inputs = StepInputs {
            token_ids: &tokens,
            positions: [&positions[..]; 3],
            rows: &[RowInputs {
                first_token: 0,
                tokens: 80,
                start: 0,
                slot: SlotId::NULL,
                continues: false,
                block_table: &pages,
            }],
            copies: &[],
            logit_rows: &logit_rows,
            shape: None,
        };
        model.forward(&inputs, &[]).unwrap();
        let score =
            |row: usize| (row, tutti_kernels::ScoreRow { token: if row == 5 { 1000 } else { 1 }, top: 0 });
        let score: Vec<_> = (0..80).map(score).collect();
        let mut out = LogitResults::default();
        model.read_logits(&LogitRequests { sample: &[], score: &score }, &mut out).unwrap();
        assert_eq!(out.scores.len(), 80);
        for (row, score) in out.scores.iter().enumerate() {
            // Only the refused request has no score.
            assert_eq!(matches!(score, Err(DeviceError::Misuse(_))), row == 5, "{row}: {score:?}");
            assert_eq!(score.is_ok(), row != 5);
        }
        assert_eq!(generate(model, &[&[3, 4, 5]], usize::MAX, 4), reference);
    });
}

/// Returns changes of a config that give a model with a dense layer and a layer of eight experts.
fn experts() -> Value {
    json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": true, "mlp_only_layers": [0],
    })
}

#[test]
fn experts_that_the_ranks_cannot_divide_are_refused_by_the_key() {
    let load = |mut changes: Value, keys: Value, size, expert_parallel| {
        changes.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        let dir = divisible(changes);
        let options = LoadOptions { expert_parallel, ..options(dir.path(), Dummy, Quantize::None) };
        let device = device().with_group(Box::new(Lone(GroupRank { rank: 0, world_size: size })));
        try_load_with(device, &options).map(|model| model.weight_bytes())
    };
    for (changes, keys, expert_parallel, expected) in [
        (
            experts(),
            json!({"moe_intermediate_size": 25}),
            false,
            "moe_intermediate_size: 25 is not a multiple of tp",
        ),
        (
            experts(),
            json!({"num_experts": 9}),
            true,
            "num_experts: 9 is not a multiple of tp, which is 2, and --ep",
        ),
        (json!({}), json!({}), true, "num_experts: the model has none that --ep could divide"),
        (
            json!({"architectures": ["Qwen3_5ForCausalLM"], "full_attention_interval": 2}),
            json!({}),
            true,
            "num_experts: the model has none that --ep could divide",
        ),
    ] {
        let error = load(changes, keys, 2, expert_parallel).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("config.json"), "{error}");
    }
    // The number of ranks must divide only the size that is split among the ranks: the width or the number of experts.
    // In both divisions, a rank holds half of the experts' bytes.
    load(experts(), json!({"moe_intermediate_size": 25}), 2, true).unwrap();
    load(experts(), json!({"num_experts": 9}), 2, false).unwrap();
    let [width, whole] = [false, true].map(|whole| load(experts(), json!({}), 2, whole).unwrap());
    assert_eq!(width, whole);
}

#[test]
fn quantised_experts_are_the_same_model_on_ranks_that_hold_them_whole() {
    let prompt: Vec<u32> = prompt(40).iter().map(|token| token % 96).collect();
    let act = |model: &mut dyn Model| generate(model, &[&prompt], usize::MAX, 8);
    // In four bits, a rank's share of the inputs of the dense projections must consist of whole groups.
    let mut whole_groups = experts();
    let wide = json!({"head_dim": 32, "intermediate_size": 128});
    whole_groups.as_object_mut().unwrap().extend(wide.as_object().unwrap().clone());
    for (changes, quantize) in [(experts(), Quantize::Int8), (whole_groups, Quantize::Int4)] {
        let dir = divisible(changes);
        let one = of_ranks_as(1, dir.path(), Dummy, quantize, act);
        let two = of_ranks_with_whole_experts(2, dir.path(), Dummy, quantize, act);
        // Each rank quantises its own shard of the dense projections. The quantisation groups of a shard hold fewer
        // weights.
        assert!(greatest_difference(&two, &one) < 0.1, "{quantize:?}: {}", greatest_difference(&two, &one));
    }
}
