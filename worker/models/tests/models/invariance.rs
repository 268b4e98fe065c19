//! Batch invariance of a whole model: chunks and other requests in the batch change no bit.

use crate::common::{bits, config, generate, loaded_as, prompt, write_config};
use serde_json::json;
use tutti_models::{LoadFormat::Dummy, Quantize};

const OUTPUT: usize = 8;

fn unchanged_by_chunks_and_mates(changes: serde_json::Value) {
    unchanged(&changes, Quantize::None);
}

fn unchanged(changes: &serde_json::Value, quantize: Quantize) {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), &config(changes));
    let mut model = loaded_as(dir.path(), Dummy, quantize);
    let prompts: Vec<Vec<u32>> = [1, 9, 64, 150].map(prompt).into();
    let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();

    let mut alone = Vec::new();
    for prompt in &prompts {
        alone.extend(generate(&mut *model, &[prompt], usize::MAX, OUTPUT));
    }
    let alone = bits(&alone);
    assert!(alone[3].1.iter().all(|row| row.len() == 97), "the whole distribution is compared");
    for chunk in [1, 7, 64, usize::MAX] {
        assert!(alone == bits(&generate(&mut *model, &prompts, chunk, OUTPUT)), "chunks of {chunk} differ");
    }
}

#[test]
fn f32_weights() {
    unchanged_by_chunks_and_mates(json!({}));
}

#[test]
fn bf16_weights_tied() {
    unchanged_by_chunks_and_mates(json!({"torch_dtype": "bfloat16", "tie_word_embeddings": true}));
}

#[test]
fn windows_yarn_and_biases() {
    unchanged_by_chunks_and_mates(json!({
        "use_sliding_window": true, "sliding_window": 16, "max_window_layers": 1, "attention_bias": true,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    }));
}

/// Llama 3, with grouped heads and without norms of heads.
#[test]
fn llama3_scaling_in_bf16() {
    unchanged_by_chunks_and_mates(json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 64},
    }));
}

/// Mistral, in which every layer has a sliding window.
#[test]
fn windows_on_all_layers() {
    unchanged_by_chunks_and_mates(json!({
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16,
    }));
}

/// Routed experts and a shared expert. The shared expert's gate and the router are in f32, even if the other weights
/// have another type.
#[test]
fn shared_experts_in_all_types() {
    for (dtype, quantize) in [
        ("float32", Quantize::None),
        ("bfloat16", Quantize::None),
        ("bfloat16", Quantize::Int8),
        ("bfloat16", Quantize::Int4),
    ] {
        let changes = json!({
            "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "torch_dtype": dtype,
            "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40, "full_attention_interval": 2, "linear_num_key_heads": 1,
            "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        });
        unchanged(&changes, quantize);
    }
}

/// Routed experts. Some of them have no rows in a small step but many rows in a large step.
#[test]
fn experts_in_all_types() {
    for (dtype, quantize) in [
        ("float32", Quantize::None),
        ("bfloat16", Quantize::None),
        ("bfloat16", Quantize::Int8),
        ("bfloat16", Quantize::Int4),
    ] {
        let changes = json!({
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": dtype,
            "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [0],
        });
        unchanged(&changes, quantize);
    }
}
