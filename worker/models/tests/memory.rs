//! Tests the peak memory of loading. The file has one test, because the peak is measured for the whole process.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::{
    fs::{self, File},
    io::Write,
    path::Path,
};

use common::{config, device, group::Lone, write_config};
use serde_json::{Map, json};
use tutti_kernels::collective::GroupRank;
use tutti_models::{LoadFormat, LoadOptions, Quantize, load};

/// Number of layers. It is large, so that memory that does not grow with the model is a small share. Such memory is
/// scratch of threads, and the mapped pages of the largest tensor.
const LAYERS: usize = 48;

/// Returns the peak resident size of the process in bytes, mapped files included.
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

/// Writes a checkpoint of zeros: a header, followed by a hole in the file with the length of the weights.
fn write_hole(file: &Path) {
    let mut header = Map::new();
    let mut end = 0;
    let mut add = |name: &str, shape: &[usize]| {
        let start = end;
        end += 4 * shape.iter().product::<usize>();
        header.insert(name.into(), json!({"dtype": "F32", "shape": shape, "data_offsets": [start, end]}));
    };
    add("model.embed_tokens.weight", &[2048, 512]);
    add("model.norm.weight", &[512]);
    for layer in 0..LAYERS {
        let mut add_weight =
            |name: &str, shape: &[usize]| add(&format!("model.layers.{layer}.{name}.weight"), shape);
        for (name, shape) in [
            ("input_layernorm", &[512][..]),
            ("post_attention_layernorm", &[512]),
            ("self_attn.q_norm", &[64]),
            ("self_attn.k_norm", &[64]),
            ("self_attn.q_proj", &[512, 512]),
            ("self_attn.k_proj", &[512, 512]),
            ("self_attn.v_proj", &[512, 512]),
            ("self_attn.o_proj", &[512, 512]),
            ("mlp.gate_proj", &[1280, 512]),
            ("mlp.up_proj", &[1280, 512]),
            ("mlp.down_proj", &[512, 1280]),
        ] {
            add_weight(name, shape);
        }
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = File::create(file).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(&header).unwrap();
    file.set_len((8 + header.len() + end) as u64).unwrap();
}

#[test]
fn loading_takes_little_more_than_the_weights() {
    let dir = tempfile::tempdir().unwrap();
    write_config(
        dir.path(),
        &config(&json!({
            "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": LAYERS,
            "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": true,
            "torch_dtype": "float32",
        })),
    );
    write_hole(&dir.path().join("model.safetensors"));
    // All models share one baseline. Each model is dropped before the next is loaded, and smaller models come first, so
    // a model that takes too much memory raises the peak. One rank of two must take less than the whole model, and int8
    // less than f32.
    let before = peak();
    for (quantize, group_rank, least) in [
        (Quantize::Int8, GroupRank { rank: 1, world_size: 2 }, 70_000_000),
        (Quantize::Int8, GroupRank::ALONE, 140_000_000),
        (Quantize::None, GroupRank { rank: 1, world_size: 2 }, 215_000_000),
        (Quantize::None, GroupRank::ALONE, 430_000_000),
    ] {
        for load_format in [LoadFormat::Auto, LoadFormat::Dummy] {
            let dir = dir.path().to_owned();
            let options = LoadOptions {
                dir,
                load_format,
                quantize,
                max_step_tokens: 16,
                page_tokens: 16,
                expert_parallel: false,
                nodes: None,
                seed: 0,
            };
            let model = load(&options, device().with_group(Box::new(Lone(group_rank))), &mut |_| {}).unwrap();
            let (taken, weights) = (peak() - before, model.weight_bytes());
            eprintln!("{load_format}, {quantize:?}, {group_rank:?}: {}", taken as f64 / weights as f64);
            assert!(weights > least, "{weights} bytes are too few to tell");
            assert!(
                taken * 20 < weights * 23,
                "{load_format}, {quantize:?}, {group_rank:?}: {taken} bytes for {weights} of weights"
            );
        }
    }
}
