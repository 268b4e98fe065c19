use serde_json::{Value, json};

use super::*;

/// Parses a config of three layers with some keys replaced. A null replaces a key by null and does not remove it.
fn parse(changes: &Value) -> Result<Config, LoadError> {
    let mut value = json!({
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 4096, "rope_theta": 1e6, "torch_dtype": "bfloat16",
    });
    for (key, change) in changes.as_object().unwrap() {
        value[key] = change.clone();
    }
    let path = "config.json".into();
    Config::parse(&ConfigFile { path, architectures: Vec::new(), model_type: None, value })
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
    assert_eq!(published.max_context(), 4096);
    assert_eq!(published.dtype, WeightType::Bf16);
}

#[test]
fn a_value_of_the_wrong_type_is_reported_by_its_key() {
    for value in [json!("many"), json!(-1), json!(1.5)] {
        let error = parse(&json!({"num_hidden_layers": value})).unwrap_err().to_string();
        assert!(error.contains("num_hidden_layers"), "{error}");
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
    assert_eq!(config.max_context(), 131_072);
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
