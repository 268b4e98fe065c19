use serde_json::{Value, json};
use tutti_kernels::Routing;

use super::*;
use crate::{
    architecture::Architecture,
    decoder::KvPlane,
    experts::Division,
    qwen3_5::{DENSE, MOE},
};

/// Parses a config of four layers with some keys replaced.
fn parse(changes: &Value) -> Result<Config, LoadError> {
    parse_as(&DENSE, changes)
}

fn parse_as(variant: &'static Variant, changes: &Value) -> Result<Config, LoadError> {
    let mut value = json!({
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
        "max_position_embeddings": 4096, "rope_theta": 1e7, "dtype": "bfloat16", "eos_token_id": 7,
    });
    for (key, change) in changes.as_object().unwrap() {
        value[key] = change.clone();
    }
    parse_value(variant, value)
}

fn parse_value(variant: &'static Variant, value: Value) -> Result<Config, LoadError> {
    Config::parse(&ConfigFile::of_value(value), variant)
}

#[test]
fn both_spellings_and_a_vision_model_mean_the_same() {
    let published = parse(&json!({"tie_word_embeddings": true})).unwrap();
    let saved = json!({
        "rope_theta": null, "tie_word_embeddings": true,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    });
    assert_eq!(parse(&saved).unwrap(), published);
    assert_eq!(
        parse(&json!({"tie_word_embeddings": true, "full_attention_interval": 4})).unwrap(),
        published
    );

    // Some keys of a vision model may be both at the top and in `text_config`. The value at the top then wins. All
    // other keys are read in one place only.
    let mut text = json!({
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
        "max_position_embeddings": 4096, "rope_theta": 1e7, "dtype": "bfloat16", "eos_token_id": 7,
    });
    text["tie_word_embeddings"] = json!(false);
    let nested = json!({"text_config": text, "tie_word_embeddings": true});
    let whole = parse_value(&DENSE, nested).unwrap();
    assert_eq!(whole, Config { prefix: "model.language_model.", ..published });
}

#[test]
fn a_quarter_of_a_head_is_rotated_by_default_and_axes_take_turns() {
    let angles = |changes| parse(&changes).unwrap().rope;
    assert_eq!(angles(json!({})).inverse.len(), 4);
    assert_eq!(angles(json!({"partial_rotary_factor": 0.5})).inverse.len(), 8);
    let sections = json!({"rope_type": "default", "rope_theta": 1e7, "mrope_section": [2, 1, 1], "mrope_interleaved": true});
    assert_eq!(angles(json!({"rope_parameters": sections})).axes, [0, 1, 2, 0]);
}

#[test]
fn state_is_declared_in_slots_and_keys_for_layers_with_attention_only() {
    let config = parse(
        &json!({"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}),
    );
    let dir = tempfile::tempdir().unwrap();
    let text = config.unwrap().text(dir.path(), 8).unwrap();
    assert_eq!(text.kv, Some(KvPlane { layers: 2, heads: 2, head_dim: 32 }));
    let units: Vec<_> =
        text.slots.iter().map(|plane| (plane.layers, plane.units, plane.unit_bytes)).collect();
    assert_eq!(units, [(2, 2, 3 * 2 * 16 * 4), (2, 4, 3 * 24 * 4), (2, 4, 16 * 24 * 4)]);
}

#[test]
fn what_is_not_supported_is_refused_by_key() {
    for (changes, words) in [
        (json!({"linear_num_value_heads": 3}), "linear_num_value_heads: 3"),
        (json!({"linear_conv_kernel_dim": 1}), "linear_conv_kernel_dim"),
        (json!({"linear_key_head_dim": 0}), "linear_key_head_dim: must be an integer from 1 to 65536, not 0"),
        (json!({"attention_bias": true}), "attention_bias"),
        (json!({"hidden_act": "gelu"}), "hidden_act: must be \"silu\", not \"gelu\""),
        (
            json!({"layer_types": ["linear_attention", "linear_attention", "full_attention"]}),
            "layer_types: names 3 layers",
        ),
        (
            json!({"layer_types": ["linear_attention", "linear_attention", "linear_attention", "linear_attention"]}),
            "layer_types: none",
        ),
        (
            json!({"layer_types": ["linear_attention", "sliding_attention", "full_attention", "full_attention"]}),
            "sliding_attention",
        ),
        (json!({"full_attention_interval": 0}), "full_attention_interval"),
        (json!({"num_hidden_layers": null}), "num_hidden_layers: is missing"),
        (json!({"dtype": "int8"}), "dtype: \"int8\""),
    ] {
        let error = parse(&changes).err().unwrap().to_string();
        assert!(error.contains(words) && error.contains("config.json"), "{error}");
    }
}

#[test]
fn ranks_share_heads_or_hold_the_same_head_of_keys() {
    let config = parse(&json!({})).unwrap();
    let shard = |size| config.shard(GroupRank { rank: 0, world_size: size });
    let heads = |size| {
        shard(size).map(|shard| {
            (shard.text.heads, shard.text.kv_heads, shard.delta.key_heads, shard.delta.value_heads)
        })
    };
    assert_eq!(heads(2), Ok((2, 1, 1, 2)));
    assert_eq!(heads(4), Ok((1, 1, 1, 1)));
    assert!(heads(8).unwrap_err().contains("num_attention_heads: 4 is not a multiple of tp, which is 8"));
    let odd = parse(&json!({"linear_num_key_heads": 3, "linear_num_value_heads": 12})).unwrap();
    let refused = odd.shard(GroupRank { rank: 0, world_size: 2 }).unwrap_err();
    assert!(
        refused.contains("linear_num_key_heads: 3 is neither a multiple nor a divisor of tp"),
        "{refused}"
    );
}

/// Defaults of transformers' `Qwen3_5MoeTextConfig`. The weights of a token's experts always have the sum 1.
#[test]
fn experts_are_those_of_the_architecture() {
    let parse = |changes| parse_as(&MOE, &changes);
    let config = parse(json!({"intermediate_size": null, "norm_topk_prob": false})).unwrap();
    let shape = ExpertShape {
        names: config.experts.as_ref().unwrap().names,
        hidden_size: 64,
        intermediate_size: 512,
        experts: 256,
        routing: Routing { renormalise: true, ..Routing::softmax(8) },
        limit: None,
        division: Division::Width,
    };
    assert_eq!((config.experts, config.intermediate_size), (Some(shape), 512));
    // A dense model has no experts, even if its config has keys of experts.
    assert_eq!(parse_as(&DENSE, &json!({"num_experts": 8})).unwrap().experts, None);
    for (changes, words) in [
        (json!({"num_experts": 4}), "num_experts_per_tok: 8 of num_experts, 4"),
        (json!({"num_experts": 0}), "num_experts: must be at least 1"),
        (json!({"num_experts_per_tok": 0}), "num_experts_per_tok: 0 of num_experts, 256"),
        (json!({"moe_intermediate_size": 0}), "moe_intermediate_size: must be at least 1"),
    ] {
        let error = parse(changes).err().unwrap().to_string();
        assert!(error.contains(words) && error.contains("config.json"), "{error}");
    }
}

#[test]
fn ranks_divide_the_shared_expert_and_the_experts() {
    let changes = json!({"moe_intermediate_size": 41, "shared_expert_intermediate_size": 58});
    let mut config = parse_as(&MOE, &changes).unwrap();
    let shard = |config: &Config, size| config.shard(GroupRank { rank: 0, world_size: size });
    assert!(shard(&config, 2).unwrap_err().contains("moe_intermediate_size: 41 is not a multiple"));
    config.divide_whole_experts().unwrap();
    assert_eq!(shard(&config, 2).unwrap().intermediate_size, 29);
    assert!(shard(&config, 4).unwrap_err().contains("shared_expert_intermediate_size: 58 is not a multiple"));
    assert!(parse(&json!({})).unwrap().divide_whole_experts().is_err());
}
