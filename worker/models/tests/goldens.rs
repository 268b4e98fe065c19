//! The golden tests in one process: models must give the numbers of Hugging Face transformers. `GOLDEN_MODELS` names a
//! directory that tests/goldens made. Without this variable, the tests are skipped with a message. tests/cluster runs
//! the same comparison over HTTP.
//!
//! With `GOLDEN_DEVICE=cuda`, which tests/gpu sets, the models run on the first GPU.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;
#[path = "../../../kernels/tests/support/paths.rs"]
mod cpu_paths;
#[path = "goldens/media.rs"]
mod media;

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
};

use common::{
    PAGES, SLOTS, generate,
    goldens::{Case, LENGTHS, bound},
    try_load_on,
};
use cpu_paths::testable;
use safetensors::SafeTensors;
use tutti_kernels::cpu::{CpuDevice, Isa};
use tutti_kernels::cuda::{CudaDevice, KernelCache};
use tutti_models::{LoadFormat::Auto, Model};

/// Loads a model on the GPU, or on the CPU with this instruction path.
fn load(dir: &Path, isa: Option<Isa>) -> Box<dyn Model> {
    let mut model = match isa {
        // Activations in eight bits are further from the reference than the bound.
        Some(isa) => {
            try_load_on(CpuDevice::new(1, isa).unwrap().with_quantised_activations(false), dir, Auto)
        }
        None => try_load_on(CudaDevice::open(0, &KernelCache::of_user()).unwrap(), dir, Auto),
    }
    .unwrap();
    model.allocate_planes(PAGES, SLOTS).unwrap();
    model
}

fn on_gpu() -> bool {
    std::env::var("GOLDEN_DEVICE").is_ok_and(|device| device == "cuda")
}

/// Compares a model with its goldens, on each instruction path of this machine. With f32 weights every prompt logprob
/// is within [`bound`], and all greedy tokens are equal. `own` is the mean deviation of Hugging Face's bfloat16 results
/// from its f32 results. With bf16 weights, the mean deviation is at most half of `own` on a CPU. It is at most twice
/// `own` on a GPU, whose products take activations in bfloat16.
fn agrees(model: &str, own: f64) {
    agrees_within(model, own, own / 2.0);
}

/// Runs [`agrees`] with `bf16_bound` as the maximum mean deviation of bf16 weights on the CPU.
fn agrees_within(model: &str, own: f64, bf16_bound: f64) {
    let Some(root) = std::env::var_os("GOLDEN_MODELS").map(PathBuf::from) else {
        eprintln!("skipped: GOLDEN_MODELS is not set");
        return;
    };
    let dir = root.join(model);
    let bytes = fs::read(dir.join("goldens.safetensors")).unwrap();
    let goldens = SafeTensors::deserialize(&bytes).unwrap();
    let paths = if on_gpu() { vec![None] } else { testable(model).into_iter().map(Some).collect() };
    for isa in paths {
        agrees_on(isa, &goldens, &dir, [own, bf16_bound]);
    }
}

/// Runs [`agrees_within`] on the GPU, or on the CPU with this instruction path.
fn agrees_on(isa: Option<Isa>, goldens: &SafeTensors<'_>, dir: &Path, [own, bf16_bound]: [f64; 2]) {
    let name = dir.file_name().and_then(OsStr::to_str).unwrap();
    let on = isa.map_or("a GPU".to_owned(), |isa| isa.to_string());
    // GGUF files, which have no config.json, hold the weights of f32 here.
    let config = fs::read_to_string(dir.join("config.json")).unwrap_or_default();
    let (bound_of_f32, mut model) = (bound(name), load(dir, isa));
    // A GPU rounds weights that are codes, and the inputs of their products, to bf16.
    let rounds_codes = isa.is_none() && model.describe().contains("as stored");
    let exact = !config.contains("bfloat16") && !rounds_codes;
    let (mut worst, mut sum, mut count) = (0.0f64, 0.0, 0);
    for length in LENGTHS {
        let case = Case::read(goldens, length);
        let whole = generate(&mut *model, &[&case.prompt], usize::MAX, case.greedy.len());
        for chunk in [1, 7, 64] {
            let chunked = generate(&mut *model, &[&case.prompt], chunk, case.greedy.len());
            assert!(chunked == whole, "t{length} on {on}: chunks of {chunk} change the result");
        }
        let (output, scores) = &whole[0];
        assert_eq!(scores.len(), length - 1);
        for (i, score) in scores.iter().enumerate() {
            let off = (f64::from(score.logprob) - case.logprob(i + 1)).abs();
            (worst, sum, count) = (worst.max(off), sum + off, count + 1);
        }
        assert!(
            !exact || *output == case.greedy,
            "t{length} on {on}: {output:?}, the reference has {:?}",
            case.greedy
        );
    }
    let mean = sum / f64::from(count);
    eprintln!("{} on {on}: |Δ logprob| mean {mean:.2e}, greatest {worst:.2e}", dir.display());
    if exact {
        assert!(worst < bound_of_f32, "greatest deviation on {on} {worst}");
    } else {
        let bound = if isa.is_none() { 2.0 * own } else { bf16_bound };
        assert!(mean < bound, "mean deviation on {on} {mean}, Hugging Face's own is {own}");
    }
}

/// The mean deviation of transformers' bfloat16 results from its f32 results, for plain models of a family.
fn own_deviation(name: &str) -> f64 {
    let families =
        [("qwen3_moe", 0.0365), ("qwen3", 0.0225), ("llama3", 0.0221), ("qwen2", 0.0240), ("smollm", 0.0249)];
    families.into_iter().find(|(family, _)| name.starts_with(family)).unwrap().1
}

/// Compares the models of a folder of tests/formats/generate with their goldens: on the fastest path of the CPU, or on
/// a GPU those that `QUANTISED_MODELS` names, or all. The reference is what transformers computes with the dequantised
/// weights. `file` is the name of the weights in a model's folder; `None` for the folder itself. `is_stored` tells by a
/// model's name if the device holds weights as stored. Fails if there are fewer than `least` models, or not all that
/// are named.
fn formats_agree(folder: &str, file: Option<&str>, is_stored: impl Fn(&str) -> bool, least: usize) {
    let Some(root) = std::env::var_os("QUANTISED_FORMATS").map(PathBuf::from) else {
        eprintln!("skipped: QUANTISED_FORMATS is not set");
        return;
    };
    let names = std::env::var("QUANTISED_MODELS").ok();
    let chosen: Option<Vec<&str>> = names.as_ref().map(|names| {
        names.split_whitespace().filter_map(|name| name.strip_prefix(folder)?.strip_prefix('/')).collect()
    });
    let is_chosen = |name: &str| chosen.as_ref().is_none_or(|chosen| chosen.contains(&name));
    let isa = (!on_gpu()).then(Isa::detect);
    let mut models = 0;
    for entry in fs::read_dir(root.join(folder)).unwrap() {
        let dir = entry.unwrap().path();
        let name = dir.file_name().and_then(OsStr::to_str).unwrap();
        if !is_chosen(name) {
            continue;
        }
        eprintln!("{}", dir.display());
        let bytes = fs::read(dir.join("goldens.safetensors")).unwrap();
        let model = file.map_or(dir.clone(), |file| dir.join(file));
        let goldens = SafeTensors::deserialize(&bytes).unwrap();
        agrees_on(isa, &goldens, &model, [own_deviation(name), 0.0]);
        let described = load(&model, isa).describe();
        assert!(described.contains("as stored") == is_stored(name), "{name}: {described}");
        models += 1;
    }
    let least = chosen.map_or(least, |chosen| chosen.len());
    assert!(models >= least, "{models} models of {least}");
}

/// Golden models in each layout of quantised weights.
#[test]
fn quantised_checkpoints() {
    // No form holds a group per input, groups of other sizes than multiples of 16, and tables of values.
    let is_stored = |name: &str| {
        let has_no_form = ["_act", "nf4"].iter().any(|end| name.ends_with(end))
            || name.starts_with("qwen3_moe")
                && ["w4_group", "w2", "w8_group", "awq"].iter().any(|part| name.contains(part))
            || ["qwen3_moe-gptq", "qwen3_moe-gptq_v2"].contains(&name);
        !has_no_form
    };
    formats_agree("goldens", None, is_stored, 60);
}

/// Golden models in GGUF files.
#[test]
fn gguf_files() {
    formats_agree("goldens-gguf", Some("model.gguf"), |name| name.contains("-q"), 20);
}

#[test]
fn qwen3() {
    agrees("qwen3", 0.0225);
}

#[test]
fn qwen3_tied() {
    agrees("qwen3_tied", 0.0266);
}

#[test]
fn qwen3_yarn_swa() {
    agrees("qwen3_yarn_swa", 0.0244);
}

#[test]
fn llama3() {
    agrees("llama3", 0.0221);
}

#[test]
fn smollm() {
    agrees_within("smollm", 0.0249, 0.0150);
}

#[test]
fn qwen2() {
    agrees("qwen2", 0.0240);
}

#[test]
fn mistral() {
    agrees("mistral", 0.0247);
}

#[test]
fn qwen3_moe() {
    agrees("qwen3_moe", 0.0365);
}

#[test]
fn qwen3_moe_nonorm() {
    agrees("qwen3_moe_nonorm", 0.0330);
}

#[test]
fn qwen3_omni() {
    agrees("qwen3_omni", 0.0260);
}

#[test]
fn qwen3_vl() {
    agrees("qwen3_vl", 0.0211);
}

#[test]
fn qwen3_vl_moe() {
    // In bfloat16, the experts of some tokens are others than in f32, which moves their logprobs by up to 0.33.
    agrees_within("qwen3_vl_moe", 0.0253, 0.0200);
}

#[test]
fn qwen3_embedding() {
    agrees_within("qwen3_embedding", 0.0254, 0.0150);
}

#[test]
fn qwen3_5() {
    agrees("qwen3_5", 0.0427);
}

#[test]
fn qwen3_5_text_tied() {
    agrees("qwen3_5_text_tied", 0.0684);
}

/// The experts of this checkpoint are stacked, as in published checkpoints. If a token chooses other experts in bf16,
/// its result deviates by the output of a whole expert. So the bound is the deviation of Hugging Face's bfloat16.
#[test]
fn qwen3_5_moe() {
    agrees_within("qwen3_5_moe", 0.1110, 0.1110);
}

/// Layers of all kinds.
#[test]
fn deepseek_v4() {
    agrees("deepseek_v4", 0.0694);
}

/// Windows alone.
#[test]
fn v4_sliding() {
    agrees("v4_sliding", 0.0276);
}

/// Windows, and entries that are all attended to.
#[test]
fn v4_hca() {
    agrees("v4_hca", 0.0261);
}

/// Windows, and entries of which an indexer chooses all.
#[test]
fn v4_csa_all() {
    agrees("v4_csa_all", 0.0221);
}

/// Experts by token id in all layers but the last.
#[test]
fn v4_hash() {
    agrees("v4_hash", 0.0242);
}

/// In this checkpoint, each expert has separate tensors.
#[test]
fn qwen3_5_moe_text() {
    agrees_within("qwen3_5_moe_text", 0.1115, 0.1115);
}
