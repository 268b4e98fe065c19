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
use serde_json::{Map, Value, json};
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

/// The form of the matrices of layers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    F32,
    /// e4m3 with a scale per block of 128 x 128.
    Float8,
    /// Four bits, transposed, with a scale and a zero point per 128 inputs.
    Gptq,
}

impl Form {
    fn quantization_config(self) -> Value {
        match self {
            Self::F32 => Value::Null,
            Self::Float8 => json!({"quant_method": "fp8", "weight_block_size": [128, 128]}),
            Self::Gptq => json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": false}),
        }
    }

    /// Returns the tensors of a matrix: suffixes, types and shapes.
    fn tensors(self, rows: usize, columns: usize) -> Vec<(&'static str, &'static str, Vec<usize>)> {
        let blocks = [rows.div_ceil(128), columns.div_ceil(128)];
        match self {
            Self::F32 => vec![("weight", "F32", vec![rows, columns])],
            Self::Float8 => {
                vec![("weight", "F8_E4M3", vec![rows, columns]), ("weight_scale_inv", "F32", blocks.to_vec())]
            }
            Self::Gptq => vec![
                ("qweight", "I32", vec![columns / 8, rows]),
                ("qzeros", "I32", vec![blocks[1], rows / 8]),
                ("scales", "F16", vec![blocks[1], rows]),
            ],
        }
    }
}

/// Writes a checkpoint of zeros: a header, followed by a hole in the file with the length of the weights.
fn write_hole(file: &Path, form: Form) {
    let mut header = Map::new();
    let mut end = 0;
    let mut add = |name: &str, dtype: &str, shape: &[usize]| {
        let start = end;
        let bytes = match dtype {
            "F8_E4M3" => 1,
            "F16" => 2,
            _ => 4,
        };
        end += bytes * shape.iter().product::<usize>();
        header.insert(name.into(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]}));
    };
    add("model.embed_tokens.weight", "F32", &[2048, 512]);
    add("model.norm.weight", "F32", &[512]);
    for layer in 0..LAYERS {
        let mut add_weight = |name: &str, shape: &[usize]| {
            let module = format!("model.layers.{layer}.{name}");
            match *shape {
                [rows, columns] => form
                    .tensors(rows, columns)
                    .iter()
                    .for_each(|(suffix, dtype, shape)| add(&format!("{module}.{suffix}"), dtype, shape)),
                _ => add(&format!("{module}.weight"), "F32", shape),
            }
        };
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
    for form in [Form::F32, Form::Float8, Form::Gptq] {
        let dir = dir.path().join(format!("{form:?}"));
        fs::create_dir(&dir).unwrap();
        let mut all = config(&json!({
            "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": LAYERS,
            "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": true,
            "torch_dtype": "float32",
        }));
        if form != Form::F32 {
            all["quantization_config"] = form.quantization_config();
        }
        write_config(&dir, &all);
        write_hole(&dir.join("model.safetensors"), form);
    }
    // All models share one baseline. Each model is dropped before the next is loaded, and smaller models come first, so
    // a model that takes too much memory raises the peak. One rank of two must take less than the whole model, and int8
    // less than f32.
    let before = peak();
    for (form, quantize, group_rank, least) in [
        (Form::F32, Quantize::Int8, GroupRank { rank: 1, world_size: 2 }, 70_000_000),
        (Form::Gptq, Quantize::None, GroupRank::ALONE, 75_000_000),
        (Form::F32, Quantize::Int8, GroupRank::ALONE, 140_000_000),
        (Form::Float8, Quantize::None, GroupRank::ALONE, 145_000_000),
        (Form::F32, Quantize::None, GroupRank { rank: 1, world_size: 2 }, 215_000_000),
        (Form::F32, Quantize::None, GroupRank::ALONE, 430_000_000),
    ] {
        for load_format in [LoadFormat::Auto, LoadFormat::Dummy] {
            if form != Form::F32 && load_format == LoadFormat::Dummy {
                continue;
            }
            let dir = dir.path().join(format!("{form:?}"));
            let options = LoadOptions {
                kv_cache_dtype: tutti_models::KvCacheDtype::Auto,
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
            eprintln!(
                "{form:?}, {load_format}, {quantize:?}, {group_rank:?}: {}",
                taken as f64 / weights as f64
            );
            assert!(weights > least, "{weights} bytes are too few to tell");
            assert!(
                taken * 20 < weights * 23,
                "{form:?}, {load_format}, {quantize:?}, {group_rank:?}: {taken} bytes for {weights} of weights"
            );
        }
    }
}
