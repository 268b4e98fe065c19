//! Small configs of each family, and the part of loading that needs only the config. Tests and fuzzers use both.

use std::path::Path;

use serde_json::{Value, json};
use tutti_kernels::collective::GroupRank;

use super::{Family, Variant};
#[cfg(feature = "hybrid-test-model")]
use crate::hybrid_test;
#[cfg(feature = "media-test-model")]
use crate::media_test;
use crate::{
    LoadError,
    architecture::Architecture,
    audio::AudioConfig,
    config::{ConfigFile, keys::Keys, ranges, text::TextConfig},
    decoder::TextShape,
    deepseek_v4,
    experts::ExpertLayout,
    llama, qwen3_5,
    vision::VisionConfig,
};

/// Maximum number of experts for which [`examine`] declares tensors per expert.
const FEW_EXPERTS: usize = 256;

/// Returns sound configs of a family. One config is plain. Other configs have RoPE keys, in `rope_scaling` or in
/// `rope_parameters`. If checkpoints of the family may have a vision encoder, two configs have the text model's keys
/// under `text_config`, one of them beside such an encoder. If all of them have one, all configs have the keys there.
/// All configs contain keys of all families, because a family ignores the keys of others.
pub(crate) fn samples(family: &Family) -> Vec<Value> {
    let plain = json!({
        "architectures": [family.architecture], "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 4096, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 24, "audio_token_id": 7, "audio_bytes_per_token": 8,
        "state_size": 16,
    });
    let with = |key: &str, value: Value| {
        let mut changed = plain.clone();
        changed[key] = value;
        changed
    };
    let plain_rope = json!({"rope_type": "default"});
    let mut all = vec![
        plain.clone(),
        with("rope_scaling", json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})),
        with(
            "rope_scaling",
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ),
        with("rope_parameters", json!({"full_attention": plain_rope, "sliding_attention": plain_rope})),
    ];
    match family.variant {
        Variant::Qwen35(_) => {
            let sections = json!({"mrope_section": [2, 1, 1], "rope_theta": 1e7});
            all.push(json!({"architectures": [family.architecture], "text_config": plain}));
            all.push(json!({
                "architectures": [family.architecture], "text_config": with("rope_parameters", sections),
                "vision_config": {"out_hidden_size": 64, "depth": 3},
            }));
            all
        }
        Variant::Llama(variant) if variant.pictures => {
            let sections = json!({"mrope_section": [8, 4, 4], "rope_theta": 1e6});
            let mut of_text = vec![with("rope_scaling", sections.clone()), with("rope_parameters", sections)];
            of_text[0]["rope_scaling"]["rope_type"] = "default".into();
            let nested = |text: Value| {
                let vision = json!({"deepstack_visual_indexes": [1, 2], "out_hidden_size": 64, "depth": 3});
                let audio = json!({"output_dim": 64});
                let objects = json!({"text_config": text, "vision_config": vision, "audio_config": audio});
                let names = variant.names;
                let mut config =
                    names.top.iter().rev().fold(objects, |inner, name| json!({ (*name): inner }));
                config["architectures"] = json!([family.architecture]);
                config
            };
            of_text.into_iter().map(nested).collect()
        }
        Variant::DeepseekV4 => deepseek_v4_samples(family),
        _ => all,
    }
}

/// Returns a config in each spelling of the keys: the published one, and that of transformers.
fn deepseek_v4_samples(family: &Family) -> Vec<Value> {
    let keys = json!({
        "architectures": [family.architecture], "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 48, "o_groups": 2,
        "o_lora_rank": 24, "max_position_embeddings": 4096, "sliding_window": 16, "index_n_heads": 2,
        "index_head_dim": 24, "index_topk": 8, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_shared_experts": 1, "moe_intermediate_size": 40, "routed_scaling_factor": 1.5, "swiglu_limit": 0.7,
        "hc_mult": 4,
    });
    let with = |changes: Value| {
        let mut all = keys.clone();
        if let (Some(all), Value::Object(changes)) = (all.as_object_mut(), changes) {
            all.extend(changes);
        }
        all
    };
    let yarn = json!({"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64});
    let set = json!({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5});
    let (sliding, sparse, heavy) =
        ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention");
    vec![
        with(json!({
            "compress_ratios": [0, 4, 128, 4, 128, 0], "num_hash_layers": 2, "qk_rope_head_dim": 16,
            "rope_theta": 1e4, "compress_rope_theta": 1.6e5, "rope_scaling": yarn,
        })),
        with(json!({
            "layer_types": [sliding, sparse, heavy, sparse, heavy],
            "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe"],
            "compress_rates": {sparse: 4, heavy: 128}, "rope_parameters": {"main": set, "compress": set},
        })),
    ]
}

/// Reads `file` as the config of a family, and declares the tensors of the first and the last layer for some ranks.
/// `dir` may hold a `generation_config.json`. Panics if a check fails.
pub(crate) fn examine(family: &Family, file: &ConfigFile, dir: &Path) -> Result<TextShape, LoadError> {
    match family.variant {
        Variant::Llama(variant) => {
            let config = llama::Config::parse(file, variant)?;
            if variant.pictures {
                encoders(&config.encoder_keys(file)?, &config.text, true)?;
            }
            declare(config, dir)
        }
        Variant::Qwen35(variant) => {
            let config = qwen3_5::Config::parse(file, variant)?;
            encoders(&file.keys(), &config.text, qwen3_5::ENCODERS.features)?;
            declare(config, dir)
        }
        Variant::DeepseekV4 => declare(deepseek_v4::Config::parse(file)?, dir),
        #[cfg(feature = "media-test-model")]
        Variant::MediaTest => declare(media_test::parse(file)?.0, dir),
        #[cfg(feature = "hybrid-test-model")]
        Variant::HybridTest => declare(hybrid_test::Config::parse(file)?, dir),
    }
}

/// Reads the configs of a family's encoders. `keys` holds their objects. `has_features` is true in a family with
/// deepstack.
fn encoders(keys: &Keys<'_>, text: &TextConfig, has_features: bool) -> Result<(), LoadError> {
    let (hidden, dtype) = (text.hidden_size, text.dtype);
    let (vision, audio) = (keys.section(ranges::VISION_CONFIG)?, keys.section(ranges::AUDIO_CONFIG)?);
    if !vision.is_missing() {
        let vision = VisionConfig::read(&vision, has_features, hidden, dtype)?;
        assert!(vision.row_width() >= hidden && vision.head_dim() > 0 && vision.pixels_of_patch() > 0);
    }
    if !audio.is_missing() {
        assert!(AudioConfig::read(&audio, hidden, dtype)?.features() > 0);
    }
    Ok(())
}

fn declare<A: Architecture>(mut config: A, dir: &Path) -> Result<TextShape, LoadError> {
    let text = config.text(dir, 64)?;
    assert!(text.limits.vocab_size > 0 && text.limits.max_context_tokens > 0);
    let experts = config.experts().map_or(0, |experts| experts.experts);
    let each = (experts <= FEW_EXPERTS).then_some(ExpertLayout::Each);
    for (rank, world_size) in [(0, 1), (0, 2), (7, 8)] {
        let group_rank = GroupRank { rank, world_size };
        let Ok(shard) = config.shard(group_rank) else { continue };
        assert_eq!(shard.layers(), config.layers());
        for layer in [0, config.layers() - 1] {
            for layout in each.into_iter().chain([ExpertLayout::Stacked]) {
                let specs = config.layer_specs(layer, layout, group_rank);
                for spec in A::tensors(&specs) {
                    let held = spec.shard_range(group_rank).elements();
                    let whole: usize = spec.shape.iter().product();
                    assert!(held <= whole, "rank {rank} holds {held} of {whole} elements: {spec:?}");
                }
            }
        }
    }
    Ok(text)
}
