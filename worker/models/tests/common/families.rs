//! Small checkpoints of each family, with dummy weights.

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{config, write_config};

/// Returns the configs of all families. Each config has the keys that distinguish its family from the others.
pub fn families() -> Vec<(&'static str, Value)> {
    let delta_nets = |changes: Value| {
        let mut all = json!({
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 24, "num_hidden_layers": 4, "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1], "mrope_interleaved": true,
            },
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        });
        merge(&mut all, changes);
        all
    };
    let experts = json!({"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24});
    let experts = |changes: Value| {
        let mut all = experts.clone();
        merge(&mut all, changes);
        all
    };
    let named = |architecture: &str, model_type: &str, changes: Value| {
        let mut all = json!({"architectures": [architecture], "model_type": model_type});
        merge(&mut all, changes);
        all
    };
    let qwen3_moe = |changes| named("Qwen3MoeForCausalLM", "qwen3_moe", experts(changes));
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    });
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    let windows = json!({"use_sliding_window": true, "sliding_window": 16, "max_window_layers": 1});
    let with_windows = |changes: Value| {
        let mut all = windows.clone();
        merge(&mut all, changes);
        all
    };
    let shared = json!({"shared_expert_intermediate_size": 40});
    vec![
        ("qwen3", json!({"tie_word_embeddings": true})),
        ("qwen3 with yarn and windows", with_windows(json!({"rope_scaling": yarn}))),
        ("llama 3", named("LlamaForCausalLM", "llama", json!({"rope_scaling": llama3}))),
        (
            "smollm",
            named(
                "LlamaForCausalLM",
                "llama",
                json!({"num_key_value_heads": 1, "tie_word_embeddings": true}),
            ),
        ),
        ("mistral", named("MistralForCausalLM", "mistral", json!({"sliding_window": 16}))),
        ("qwen2.5", named("Qwen2ForCausalLM", "qwen2", with_windows(json!({})))),
        ("qwen3-moe", qwen3_moe(json!({"norm_topk_prob": true, "mlp_only_layers": [0]}))),
        ("qwen3-moe without norm", qwen3_moe(json!({"norm_topk_prob": false}))),
        ("qwen3.5", named("Qwen3_5ForCausalLM", "qwen3_5_text", delta_nets(json!({})))),
        ("qwen3.5-moe", named("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", delta_nets(experts(shared)))),
    ]
}

/// Returns the config of a DeepSeek-V4 with layers of all kinds. Both kinds of entries close within a short prompt.
/// Four ranks can divide it.
pub fn deepseek_v4() -> (&'static str, Value) {
    let config = json!({
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "num_key_value_heads": 1,
        "head_dim": 24, "qk_rope_head_dim": 8, "q_lora_rank": 20, "o_groups": 4, "o_lora_rank": 12,
        "sliding_window": 16, "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4, 0],
        "compress_rates": {"heavily_compressed_attention": 16}, "index_n_heads": 3, "index_head_dim": 16,
        "index_topk": 2, "num_hash_layers": 2, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "rope_theta": 1e4,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    });
    ("deepseek-v4", config)
}

fn merge(config: &mut Value, changes: Value) {
    let (Some(config), Value::Object(changes)) = (config.as_object_mut(), changes) else { return };
    config.extend(changes);
}

/// Writes the config of a family with changes, and returns the checkpoint's directory.
pub fn checkpoint(family: &Value, changes: Value) -> TempDir {
    let mut all = family.clone();
    merge(&mut all, changes);
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), &config(&all));
    dir
}
