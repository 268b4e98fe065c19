use serde_json::{Value, json};
use tutti_kernels::WeightType;

use super::*;
use crate::families::{self, FAMILIES};

/// Parses a Qwen3 config of three layers with some keys replaced. A null in `changes` sets the key to null and does not
/// remove it.
fn parse(changes: &Value) -> Result<Config, LoadError> {
    parse_as("qwen3", changes)
}

/// Parses the config of [`parse`] as a config of the family `model_type`.
fn parse_as(model_type: &str, changes: &Value) -> Result<Config, LoadError> {
    let family = FAMILIES.iter().find(|family| family.model_type == model_type).unwrap();
    let families::Variant::Llama(variant) = family.variant else { panic!("{model_type} is no Llama") };
    let mut value = json!({
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 4096, "rope_theta": 1e6, "torch_dtype": "bfloat16",
    });
    for (key, change) in changes.as_object().unwrap() {
        value[key] = change.clone();
    }
    Config::parse(&ConfigFile::of_value(value), variant)
}

#[test]
fn both_spellings_and_null_keys_mean_the_same() {
    let published = parse(&json!({
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "use_sliding_window": true, "sliding_window": 16, "max_window_layers": 1,
    }));
    let saved = parse(&json!({
        "rope_theta": null,
        "rope_scaling": null,
        "rope_parameters": {"rope_type": "yarn", "type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                            "original_max_position_embeddings": 64},
        "use_sliding_window": true, "sliding_window": 16, "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "torch_dtype": null, "dtype": "bfloat16",
    }));
    let published = published.unwrap();
    assert_eq!(published, saved.unwrap());
    assert_eq!(published.windows, [None, Some(16), Some(16)]);
    assert_eq!(published.text.max_context, 4096);
    assert_eq!(published.text.dtype, WeightType::Bf16);
}

#[test]
fn a_value_of_the_wrong_type_is_reported_by_its_key() {
    for value in [json!("many"), json!(-1), json!(1.5)] {
        let error = parse(&json!({"num_hidden_layers": value})).unwrap_err().to_string();
        assert!(error.contains("num_hidden_layers"), "{error}");
    }
}

/// Loading allocates tables of these sizes before it looks for any tensor.
#[test]
fn a_config_of_absurd_size_is_refused_before_memory_is_taken_for_it() {
    for (key, limit) in [("num_hidden_layers", "4096"), ("head_dim", "65536")] {
        let error = parse(&json!({key: u64::MAX / 2})).unwrap_err().to_string();
        assert!(
            error.contains(&format!("{key}: must be an integer from 1 to {limit}, not 9223372036854775807")),
            "{error}"
        );
    }
}

#[test]
fn windows_need_to_be_switched_on() {
    let windows = |changes: Value| parse(&changes).unwrap().windows;
    assert_eq!(windows(json!({"sliding_window": 16, "max_window_layers": 0})), [None; 3]);
    assert_eq!(
        windows(json!({"use_sliding_window": true, "max_window_layers": 2})),
        [None, None, Some(4096)]
    );
    let null = json!({"use_sliding_window": true, "max_window_layers": 0, "sliding_window": null});
    assert_eq!(windows(null), [None; 3]);
}

#[test]
fn yarn_lengthens_the_context_that_the_config_forgot_to() {
    let scaling = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
    let config = parse(&json!({"max_position_embeddings": 40960, "rope_scaling": scaling})).unwrap();
    assert_eq!(config.text.max_context, 131_072);
}

#[test]
fn a_value_that_cannot_be_honoured_names_its_key() {
    for (changes, key, value) in [
        (json!({"vocab_size": null}), "vocab_size", "missing"),
        (json!({"num_hidden_layers": 0}), "num_hidden_layers", "not 0"),
        (json!({"num_key_value_heads": 3}), "num_attention_heads", "not a multiple"),
        (json!({"head_dim": 31}), "head_dim", "31"),
        (json!({"hidden_act": "gelu"}), "hidden_act", "gelu"),
        (json!({"rms_norm_eps": -1e-6}), "rms_norm_eps", "-"),
        (json!({"hidden_size": -64}), "hidden_size", "-64"),
        (json!({"torch_dtype": "float8_e4m3fn"}), "dtype", "float8_e4m3fn"),
        (json!({"layer_types": ["full_attention"]}), "layer_types", "1 layers"),
        (json!({"layer_types": ["full_attention", "x", "y"]}), "layer_types", "\"x\""),
        (json!({"layer_types": vec!["sliding_attention"; 3]}), "layer_types", "use_sliding_window"),
        (json!({"rope_scaling": {"rope_type": "longrope"}}), "rope_type", "longrope"),
        (json!({"rope_scaling": {"rope_type": "yarn", "factor": 0}}), "factor", "not 0"),
        (json!({"rope_theta": 0}), "rope_theta", "not 0"),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor", "16 of 32"),
        (json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor", "1.5"),
    ] {
        let error = parse(&changes).unwrap_err().to_string();
        for expected in ["config.json", key, value] {
            assert!(error.contains(expected), "{expected:?} is not in {error:?}");
        }
    }
}

#[test]
fn families_differ_in_biases_norms_and_windows() {
    let found = |model_type: &str, changes: Value| {
        let config = parse_as(model_type, &changes).unwrap();
        (config.qkv_bias, config.o_bias, config.variant.head_norms, config.windows[0], config.windows[2])
    };
    let all = json!({
        "attention_bias": true, "use_sliding_window": true, "sliding_window": 16, "max_window_layers": 1,
    });
    assert_eq!(found("llama", all.clone()), (true, true, false, None, None));
    assert_eq!(found("mistral", all.clone()), (false, false, false, Some(16), Some(16)));
    assert_eq!(found("qwen2", all.clone()), (true, false, false, None, Some(16)));
    assert_eq!(found("qwen3", all), (true, true, true, None, Some(16)));

    assert_eq!(found("llama", json!({})), (false, false, false, None, None));
    // A Mistral config without `sliding_window` has the default window of transformers. With null, it has no window.
    assert_eq!(found("mistral", json!({})), (false, false, false, Some(4096), Some(4096)));
    assert_eq!(found("mistral", json!({"sliding_window": null})), (false, false, false, None, None));
    assert_eq!(found("qwen2", json!({})), (true, false, false, None, None));
}

#[test]
fn a_missing_head_dim_is_a_share_of_the_hidden_size_or_fixed() {
    let head_dim =
        |model_type: &str| parse_as(model_type, &json!({"head_dim": null})).map(|c| c.text.head_dim);
    for model_type in ["llama", "mistral", "qwen2"] {
        assert_eq!(head_dim(model_type).unwrap(), 16, "{model_type}");
    }
    assert_eq!(head_dim("qwen3").unwrap(), 128);
    let error = parse_as("llama", &json!({"head_dim": null, "hidden_size": 66})).unwrap_err().to_string();
    assert!(error.contains("hidden_size: 66 is not a multiple of num_attention_heads, 4"), "{error}");
}

#[test]
fn biases_of_the_mlp_are_refused() {
    let error = parse_as("llama", &json!({"mlp_bias": true})).unwrap_err().to_string();
    assert!(error.contains("mlp_bias"), "{error}");
    parse_as("llama", &json!({"mlp_bias": false})).unwrap();
}

#[test]
fn experts_are_in_the_layers_that_the_keys_name() {
    let sparse = |changes: Value| {
        let mut keys = json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20});
        keys.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        parse_as("qwen3_moe", &keys).map(|config| config.moe)
    };
    let layers = |changes: Value| sparse(changes).unwrap().unwrap().sparse;
    assert_eq!(layers(json!({})), [true; 3]);
    assert_eq!(layers(json!({"mlp_only_layers": [1]})), [true, false, true]);
    assert_eq!(layers(json!({"decoder_sparse_step": 2})), [false, true, false]);
    for dense in [
        json!({"num_experts": 0}),
        json!({"mlp_only_layers": [0, 1, 2]}),
        json!({"decoder_sparse_step": 4}),
        json!({"decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    ] {
        assert_eq!(sparse(dense).unwrap(), None);
    }
    // By default, the weights of experts are not renormalised.
    assert!(!sparse(json!({})).unwrap().unwrap().shape.routing.renormalise);
    assert!(sparse(json!({"norm_topk_prob": true})).unwrap().unwrap().shape.routing.renormalise);
    for (changes, key) in [
        (json!({"num_experts_per_tok": 5}), "num_experts_per_tok: 5 of num_experts, 4"),
        (json!({"num_experts_per_tok": 0}), "num_experts_per_tok: 0"),
        (json!({"moe_intermediate_size": 0}), "moe_intermediate_size"),
        (json!({"decoder_sparse_step": 0}), "decoder_sparse_step"),
    ] {
        let error = sparse(changes).unwrap_err().to_string();
        assert!(error.contains(key) && error.contains("config.json"), "{error}");
    }
    assert_eq!(parse_as("qwen3", &json!({"num_experts": 4})).unwrap().moe, None);
    // In Qwen3-MoE, unlike in dense Qwen3, a window applies to all layers.
    let windows = json!({"use_sliding_window": true, "sliding_window": 16, "max_window_layers": 1});
    assert_eq!(parse_as("qwen3_moe", &windows).unwrap().windows, [Some(16); 3]);
}
