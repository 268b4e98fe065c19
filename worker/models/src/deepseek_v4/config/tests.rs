use serde_json::{Value, json};

use super::*;
use crate::{architecture::Architecture, decoder::EntryPlane};

/// Parses a config of five layers with some keys replaced.
fn parse(changes: &Value) -> Result<Config, String> {
    let mut value = json!({
        "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 48, "o_groups": 2, "o_lora_rank": 24,
        "max_position_embeddings": 4096, "sliding_window": 16, "index_n_heads": 2, "index_head_dim": 24,
        "index_topk": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "compress_ratios": [0, 4, 128, 4, 128, 0], "num_hash_layers": 2, "qk_rope_head_dim": 16,
        "rope_theta": 1e4, "compress_rope_theta": 1.6e5, "dtype": "bfloat16",
        "rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64},
    });
    for (key, change) in changes.as_object().unwrap() {
        value[key] = change.clone();
    }
    Config::parse(&ConfigFile::of_value(value)).map_err(|error| error.to_string())
}

#[test]
fn both_spellings_mean_the_same() {
    let published = parse(&json!({})).unwrap();
    let set = |changes: Value| {
        let mut set = json!({"partial_rotary_factor": 0.5});
        set.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        set
    };
    let (sliding, sparse, heavy) =
        ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention");
    let saved = json!({
        "compress_ratios": null, "num_hash_layers": null, "qk_rope_head_dim": null, "rope_scaling": null,
        "layer_types": [sliding, sparse, heavy, sparse, heavy],
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe"],
        "compress_rates": {sparse: 4, heavy: 128}, "partial_rotary_factor": 0.5,
        "rope_parameters": {
            "main": set(json!({"rope_type": "default", "rope_theta": 1e4})),
            "compress": set(json!({"rope_type": "yarn", "rope_theta": 1.6e5, "factor": 16.0, "attention_factor": 1.0,
                                   "original_max_position_embeddings": 64})),
        },
    });
    assert_eq!(parse(&saved).unwrap(), published);
    let kinds =
        [LayerKind::Sliding, LayerKind::Sparse, LayerKind::Heavy, LayerKind::Sparse, LayerKind::Heavy];
    assert_eq!(
        (&published.layers[..], published.by_token),
        (&kinds[..], vec![true, true, false, false, false])
    );
}

/// Sliding layers have plain frequencies. YaRN's factor of sines and cosines is 1.
#[test]
fn each_rotation_has_a_base_of_its_own_and_one_is_extended() {
    let [main, compress] = parse(&json!({})).unwrap().ropes;
    assert_eq!((main.inverse.len(), compress.inverse.len()), (8, 8));
    assert_eq!((main.scale, compress.scale), (1.0, 1.0));
    let base =
        |inverse: &[f32], theta: f64| (f64::from(inverse[1]) / theta.powf(-2.0 / 16.0) - 1.0).abs() < 1e-6;
    assert!(base(&main.inverse, 1e4) && !base(&compress.inverse, 1e4));
    let slowest = 1.6e5f64.powf(-14.0 / 16.0) / 16.0;
    assert!((f64::from(compress.inverse[7]) / slowest - 1.0).abs() < 1e-6, "{compress:?}");
    let [_, plain] = parse(&json!({"rope_scaling": null})).unwrap().ropes;
    assert!(base(&plain.inverse, 1.6e5));
}

/// Defaults of transformers' `DeepseekV4Config`.
#[test]
fn keys_that_are_missing_have_the_defaults_of_the_reference() {
    let config = json!({
        "vocab_size": 129_280, "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
    });
    let config = Config::parse(&ConfigFile::of_value(config)).unwrap();
    assert_eq!(config.layers[..4], [LayerKind::Heavy, LayerKind::Heavy, LayerKind::Heavy, LayerKind::Sparse]);
    assert_eq!((config.count(LayerKind::Sparse), config.count(LayerKind::Heavy)), (20, 23));
    assert_eq!(config.by_token.iter().filter(|by_token| **by_token).count(), 3);
    assert_eq!((config.rotated(), config.window, config.q_rank), (64, 128, 1024));
    assert_eq!((config.groups, config.group_width, config.ratios), (8, 1024, [4, 128]));
    assert_eq!(config.experts.limit, Some(10.0));
}

/// The bytes per token and per slot of the published V4-Flash, with two layers of each kind.
#[test]
fn planes_have_the_bytes_of_the_published_shape() {
    let config = json!({
        "vocab_size": 129_280, "hidden_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 64,
        "compress_ratios": [0, 0, 4, 128, 4, 128, 0], "num_hash_layers": 3, "torch_dtype": "bfloat16",
    });
    let config = Config::parse(&ConfigFile::of_value(config)).unwrap();
    let text = config.text(tempfile::tempdir().unwrap().path(), 8).unwrap();
    assert_eq!((text.kv, text.page_tokens), (None, Some(128)));
    let plane = |name, width, ratio| EntryPlane { name, layers: 2, width, ratio };
    assert_eq!(
        text.entries,
        [plane("csa_entries", 512, 4), plane("index_keys", 128, 4), plane("hca_entries", 512, 128)]
    );
    let slots: Vec<_> = text.slots.iter().map(|slot| (slot.name, slot.layers, slot.unit_bytes)).collect();
    assert_eq!(
        slots,
        [
            ("window", 6, 128 * 512 * 2),
            ("csa_partials", 2, 9 * 512 * 4),
            ("index_partials", 2, 9 * 128 * 4),
            ("hca_partials", 2, 3 * 512 * 4),
        ]
    );
}

/// Planes exist for kinds of layers that the model has.
#[test]
fn a_model_without_entries_has_windows_alone() {
    let dir = tempfile::tempdir().unwrap();
    let planes = |ratios: Value| {
        let text = parse(&json!({"compress_ratios": ratios})).unwrap().text(dir.path(), 8).unwrap();
        let entries: Vec<_> = text.entries.iter().map(|plane| plane.name).collect();
        (entries, text.slots.iter().map(|plane| plane.name).collect::<Vec<_>>())
    };
    assert_eq!(planes(json!([0, 0, 0, 0, 0])), (vec![], vec!["window"]));
    assert_eq!(planes(json!([0, 0, 128, 0, 0])), (vec!["hca_entries"], vec!["window", "hca_partials"]));
}

#[test]
fn what_is_not_supported_is_refused_by_key() {
    for (changes, words) in [
        (json!({"num_key_value_heads": 2}), "num_key_value_heads: 2 is not supported"),
        (json!({"o_groups": 3}), "o_groups: 3 does not divide num_attention_heads, 4"),
        (
            json!({"compress_ratios": [0, 4, 128, 4]}),
            "compress_ratios: names 4 layers, but num_hidden_layers is 5",
        ),
        (json!({"compress_ratios": [0, 4, 128, 4, 8]}), "compress_ratios: 8 is none of 0, 4, 128"),
        (json!({"layer_types": ["full_attention"]}), "layer_types: names 1 layers"),
        (json!({"num_hash_layers": 5}), "num_hash_layers: the last of 5 layers"),
        (json!({"mlp_layer_types": ["moe", "moe"]}), "mlp_layer_types: names 2 layers"),
        (
            json!({"mlp_layer_types": ["moe", "moe", "moe", "moe", "hash_moe"]}),
            "mlp_layer_types: the last of 5 layers",
        ),
        (
            json!({"mlp_layer_types": ["moe", "moe", "moe", "moe", "dense"]}),
            "\"dense\" is none of hash_moe, moe",
        ),
        (json!({"compress_rates": {"heavily_compressed_attention": 96}}), "heavily_compressed_attention: 96"),
        (json!({"compress_rate_csa": 3}), "compress_rate_csa: 3 does not divide the 128 tokens"),
        (json!({"qk_rope_head_dim": 40}), "qk_rope_head_dim: 40 of head_dim, 32"),
        (json!({"qk_rope_head_dim": 15}), "qk_rope_head_dim"),
        (json!({"index_head_dim": 14}), "index_head_dim: 14 is less than qk_rope_head_dim, 16"),
        (json!({"n_shared_experts": 2}), "n_shared_experts"),
        (json!({"scoring_func": "softmax"}), "scoring_func: must be \"sqrtsoftplus\", not \"softmax\""),
        (json!({"attention_bias": true}), "attention_bias"),
        (json!({"num_experts_per_tok": 9}), "num_experts_per_tok: 9 of n_routed_experts, 8"),
        (json!({"hc_mult": 0}), "hc_mult"),
    ] {
        let error = parse(&changes).unwrap_err();
        assert!(error.contains(words) && error.contains("config.json"), "{error}");
    }
}

#[test]
fn ranks_divide_groups_of_heads() {
    let mut config = parse(&json!({})).unwrap();
    let shard = |config: &Config, size| config.shard(GroupRank { rank: 1, world_size: size });
    let half = shard(&config, 2).unwrap();
    assert_eq!((half.text.heads, half.groups, half.shared_width), (2, 1, 20));
    assert!(shard(&config, 4).unwrap_err().contains("o_groups: 2 is not a multiple of tp, which is 4"));
    config.divide_whole_experts().unwrap();
    assert_eq!(shard(&config, 2).unwrap().groups, 1);
    let odd = parse(&json!({"moe_intermediate_size": 41})).unwrap();
    assert!(shard(&odd, 2).unwrap_err().contains("moe_intermediate_size: 41"));
}
