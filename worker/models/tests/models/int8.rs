//! `--quantize int8` on a whole model: deviation of logprobs, memory, and batch invariance.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::common::{
    bits, config, generate,
    goldens::{Case, LENGTHS},
    group::of_ranks_as,
    loaded_as, prompt, try_load_as, unscreened_device, write_config,
};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use tutti_kernels::TokenScore;
use tutti_models::{
    LoadFormat::{Auto, Dummy},
    Model, Quantize,
};

/// Deviation between two sets of logprobs.
struct Deviation {
    mean: f32,
    /// 99th percentile of the deviations.
    p99: f32,
    greatest: f32,
}

impl Deviation {
    fn between(a: &[f32], b: &[f32]) -> Self {
        assert!(a.len() == b.len() && !a.is_empty());
        let mut off: Vec<f32> = a.iter().zip(b).map(|(a, b)| (a - b).abs()).collect();
        off.sort_by(f32::total_cmp);
        let mean = off.iter().sum::<f32>() / off.len() as f32;
        Self { mean, p99: off[off.len() * 99 / 100], greatest: off[off.len() - 1] }
    }
}

/// Returns the logprobs of all tokens of these prompts, except the first token of each prompt.
fn logprobs(model: &mut dyn Model, prompts: &[Vec<u32>]) -> Vec<f32> {
    let score = |prompt: &Vec<u32>| generate(model, &[prompt], usize::MAX, 1).remove(0).1;
    prompts.iter().flat_map(score).map(|score: TokenScore| score.logprob).collect()
}

fn report(what: &str, against: &str, count: usize, deviation: &Deviation) {
    let Deviation { mean, p99, greatest } = deviation;
    eprintln!(
        "{what}, {count} tokens, against {against}: |Δ logprob| mean {mean:.4}, p99 {p99:.4}, greatest {greatest:.4}"
    );
}

/// Runs the shipped model on conversations that it has memorised. The shipped model is trained, and the golden models
/// are not.
#[test]
fn the_shipped_model_strays_little() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/tutti-tiny/checkpoint");
    let prompts: Vec<Vec<u32>> = serde_json::from_str(include_str!("int8/oracle_ids.json")).unwrap();
    let stored = logprobs(&mut *loaded_as(&dir, Auto, Quantize::None), &prompts);
    let int8 = logprobs(&mut *loaded_as(&dir, Auto, Quantize::Int8), &prompts);
    let deviation = Deviation::between(&int8, &stored);
    report("tutti-tiny", "its bf16", int8.len(), &deviation);
    // The bounds are 1.25 times the measured values, because some instruction paths round differently.
    assert!(deviation.mean < 0.02 && deviation.p99 < 0.15, "strays too far");
    assert!(deviation.greatest > 0.0, "nothing was quantised");
}

/// Compares a golden model in int8 with the same model in its stored type, and with the reference of Hugging Face.
fn golden(set: &str, model: &str) {
    let Some(root) = std::env::var_os("GOLDEN_MODELS").map(PathBuf::from) else {
        eprintln!("skipped: GOLDEN_MODELS is not set");
        return;
    };
    let dir = root.join("..").join(set).join(model);
    let bytes = fs::read(dir.join("goldens.safetensors")).unwrap();
    let goldens = SafeTensors::deserialize(&bytes).unwrap();
    let cases: Vec<Case> = LENGTHS[1..].iter().map(|&length| Case::read(&goldens, length)).collect();
    let reference: Vec<f32> =
        cases.iter().flat_map(|case| (1..case.prompt.len()).map(|i| case.logprob(i) as f32)).collect();
    let prompts: Vec<Vec<u32>> = cases.into_iter().map(|case| case.prompt).collect();
    let stored = logprobs(&mut *loaded_as(&dir, Auto, Quantize::None), &prompts);
    let int8 = logprobs(&mut *loaded_as(&dir, Auto, Quantize::Int8), &prompts);
    for (against, other) in [("the stored weights", stored), ("the f32 reference", reference)] {
        let deviation = Deviation::between(&int8, &other);
        report(&format!("{set}/{model}"), against, int8.len(), &deviation);
        // The bounds are 1.25 times the maximum measured values. Random weights amplify noise, and transformers in bf16
        // deviates, too.
        assert!(deviation.mean < 0.083 && deviation.p99 < 0.29, "strays too far from {against}");
    }
}

#[test]
fn golden_models_stray_little() {
    for set in ["seed0", "seed1", "bf16"] {
        for model in ["qwen3", "qwen3_tied", "qwen3_yarn_swa"] {
            golden(set, model);
        }
    }
}

fn dummy(changes: &Value) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), &config(changes));
    dir
}

/// With int8 weights, chunks and other requests in the batch change no bit.
#[test]
fn neither_chunks_nor_mates_change_a_bit() {
    const OUTPUT: usize = 8;
    let wide = json!({
        "torch_dtype": "bfloat16", "tie_word_embeddings": true, "hidden_size": 200, "intermediate_size": 300,
    });
    for changes in [wide, json!({"attention_bias": true})] {
        let dir = dummy(&changes);
        let mut model = loaded_as(dir.path(), Dummy, Quantize::Int8);
        let prompts: Vec<Vec<u32>> = [1, 9, 64, 150].map(prompt).into();
        let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        let mut alone = Vec::new();
        for prompt in &prompts {
            alone.extend(generate(&mut *model, &[prompt], usize::MAX, OUTPUT));
        }
        let alone = bits(&alone);
        for chunk in [1, 7, 64, usize::MAX] {
            let batched = bits(&generate(&mut *model, &prompts, chunk, OUTPUT));
            assert!(alone == batched, "chunks of {chunk} differ");
        }
    }
}

/// Compares TP groups with one rank. If each rank's heads and intermediate width are whole quantisation groups, all
/// int8 numbers are those of one rank, and only sums over ranks round differently. Otherwise the quantisation groups
/// contain other weights and have other scales.
///
/// If a sum differs in its last bit, an activation may round to another value in int8 or, in attention and in the
/// pages, in bfloat16. One such difference changes a token's logprob by far more than the bound. Later tokens read the
/// changed keys and values from the pages. Most prompts have no such difference, and a few have several. So the bound
/// holds for the median prompt.
#[test]
fn ranks_agree() {
    const PROMPTS: u32 = 9;
    let whole_groups = json!({
        "vocab_size": 96, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 128, "torch_dtype": "bfloat16",
    });
    for (changes, bound) in [(whole_groups, 0.0002), (json!({"vocab_size": 96}), 0.013)] {
        let dir = dummy(&changes);
        let prompts: Vec<Vec<u32>> = (0..PROMPTS)
            .map(|index| prompt(120).iter().map(|token| (token * (2 * index + 1) + index) % 96).collect())
            .collect();
        let run =
            |size| of_ranks_as(size, dir.path(), Dummy, Quantize::Int8, |model| logprobs(model, &prompts));
        let one = run(1);
        for size in [2, 4] {
            let many = run(size);
            report(&format!("{size} ranks"), "one", one.len(), &Deviation::between(&many, &one));
            let tokens = one.len() / prompts.len();
            let each = many.chunks_exact(tokens).zip(one.chunks_exact(tokens));
            let mut means: Vec<f32> = each.map(|(many, one)| Deviation::between(many, one).mean).collect();
            means.sort_by(f32::total_cmp);
            let median = means[means.len() / 2];
            eprintln!("by prompt: median {median:.5} of {means:.5?}");
            assert!(median < bound, "{size} ranks stray");
        }
    }
}

/// Tests that `weight_bytes` is little more than one byte per weight. Admission, metrics and the default size of the KV
/// pool use this number.
#[test]
fn weights_take_little_more_than_a_byte_each() {
    let dir = dummy(&json!({
        "torch_dtype": "bfloat16", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": false,
    }));
    let bytes = |quantize| {
        let model = try_load_as(unscreened_device(), dir.path(), Dummy, quantize).unwrap();
        model.weight_bytes() as f64
    };
    let (stored, int8) = (bytes(Quantize::None), bytes(Quantize::Int8));
    assert!((0.5..0.54).contains(&(int8 / stored)), "{int8} bytes of {stored}");
    let model = loaded_as(dir.path(), Dummy, Quantize::Int8);
    assert!(model.describe().contains("int8"), "{}", model.describe());
}
