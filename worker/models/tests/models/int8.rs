//! `--quantize int8` and `int4` on a whole model: deviation of logprobs, memory, and batch invariance.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::common::{
    PAGES, SLOTS, bits, config, device, generate,
    goldens::{Case, LENGTHS},
    group::{Lone, of_ranks_as},
    loaded_as, options, prompt, try_load_as, unscreened_device, write_config,
};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use tutti_kernels::{
    TokenScore,
    collective::GroupRank,
    cpu::{CpuDevice, Isa},
};
use tutti_models::{
    LoadFormat::{Auto, Dummy},
    Model, Quantize, footprints,
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
    // The bounds are 1.25 times the measured values, because some instruction paths round differently.
    for (quantize, mean, p99) in [(Quantize::Int8, 0.0215, 0.166), (Quantize::Int4, 0.16, 1.42)] {
        let quantised = logprobs(&mut *loaded_as(&dir, Auto, quantize), &prompts);
        let deviation = Deviation::between(&quantised, &stored);
        report(&format!("tutti-tiny in {quantize:?}"), "its bf16", quantised.len(), &deviation);
        assert!(deviation.mean < mean && deviation.p99 < p99, "strays too far in {quantize:?}");
        assert!(deviation.greatest > 0.0, "nothing was quantised");
    }
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
    // The bounds are 1.25 times the maximum measured values. Random weights amplify noise, and transformers in bf16
    // deviates, too.
    for (quantize, mean, p99) in [(Quantize::Int8, 0.083, 0.29), (Quantize::Int4, 0.61, 2.2)] {
        let quantised = logprobs(&mut *loaded_as(&dir, Auto, quantize), &prompts);
        for (against, other) in [("the stored weights", &stored), ("the f32 reference", &reference)] {
            let deviation = Deviation::between(&quantised, other);
            report(&format!("{set}/{model} in {quantize:?}"), against, quantised.len(), &deviation);
            assert!(
                deviation.mean < mean && deviation.p99 < p99,
                "{quantize:?} strays too far from {against}"
            );
        }
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

/// With quantised weights, chunks and other requests in the batch change no bit.
#[test]
fn neither_chunks_nor_mates_change_a_bit() {
    const OUTPUT: usize = 8;
    let wide = json!({
        "torch_dtype": "bfloat16", "tie_word_embeddings": true, "hidden_size": 200, "intermediate_size": 300,
    });
    let bias = json!({"attention_bias": true});
    for (changes, quantize) in
        [(&wide, Quantize::Int8), (&bias, Quantize::Int8), (&wide, Quantize::Int4), (&bias, Quantize::Int4)]
    {
        let dir = dummy(changes);
        let mut model = loaded_as(dir.path(), Dummy, quantize);
        let prompts: Vec<Vec<u32>> = [1, 9, 64, 150].map(prompt).into();
        let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        let mut alone = Vec::new();
        for prompt in &prompts {
            alone.extend(generate(&mut *model, &[prompt], usize::MAX, OUTPUT));
        }
        let alone = bits(&alone);
        for chunk in [1, 7, 64, usize::MAX] {
            let batched = bits(&generate(&mut *model, &prompts, chunk, OUTPUT));
            assert!(alone == batched, "chunks of {chunk} differ in {quantize:?}");
        }
    }
}

/// With weights that a checkpoint stores quantised, chunks, other requests in the batch and threads change no bit.
#[test]
fn neither_chunks_nor_mates_nor_threads_change_a_bit_of_quantised_checkpoints() {
    const OUTPUT: usize = 8;
    let Some(root) = std::env::var_os("QUANTISED_FORMATS").map(PathBuf::from) else {
        eprintln!("skipped: QUANTISED_FORMATS is not set");
        return;
    };
    for model in [
        "goldens/qwen3-fp8_blocks",
        "goldens/llama3-w4_group",
        "goldens/qwen3-w4_group_asym",
        "goldens/qwen3-nvfp4",
        "goldens/qwen3_moe-w8a8_asym",
        "goldens-gguf/smollm-q4_1/model.gguf",
        "goldens-gguf/qwen3_moe-q4_0/model.gguf",
        "goldens-gguf/qwen2-q5_0/model.gguf",
    ] {
        let prompts: Vec<Vec<u32>> = [1, 9, 64, 150].map(prompt).into();
        let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        let mut alone = Vec::new();
        for threads in [1, 3] {
            let device = CpuDevice::new(threads, Isa::detect()).unwrap();
            let mut model = try_load_as(device, &root.join(model), Auto, Quantize::None).unwrap();
            model.allocate_planes(PAGES, SLOTS).unwrap();
            if alone.is_empty() {
                for prompt in &prompts {
                    alone.extend(generate(&mut *model, &[prompt], usize::MAX, OUTPUT));
                }
            }
            for chunk in [1, 7, 64, usize::MAX] {
                let batched = bits(&generate(&mut *model, &prompts, chunk, OUTPUT));
                assert!(
                    bits(&alone) == batched,
                    "{}: chunks of {chunk}, {threads} threads",
                    model.describe()
                );
            }
        }
    }
}

/// The memory that is declared before a quantised checkpoint is loaded is what its weights take, without padding.
#[test]
fn quantised_checkpoints_take_the_memory_that_is_declared() {
    let Some(root) = std::env::var_os("QUANTISED_FORMATS").map(PathBuf::from) else {
        eprintln!("skipped: QUANTISED_FORMATS is not set");
        return;
    };
    for (model, has_int4) in [
        ("goldens/qwen3-fp8_blocks", false),
        ("goldens/llama3-w4_group", true),
        ("goldens/qwen3-gptq", true),
        ("goldens/qwen3-gptq_act", false),
        ("goldens/qwen3-nvfp4", false),
        ("goldens-gguf/smollm-q4_1/model.gguf", true),
        ("goldens-gguf/qwen2-q8_0/model.gguf", false),
    ] {
        let dir = root.join(model);
        let [declared] = footprints(&options(&dir, Auto, Quantize::None), 1).unwrap()[..] else {
            panic!("one rank")
        };
        let held = try_load_as(unscreened_device(), &dir, Auto, Quantize::None).unwrap().weight_bytes();
        assert_eq!(declared.has_int4, has_int4, "{model}");
        assert!(
            (declared.weight_bytes..=declared.weight_bytes * 6 / 5).contains(&held),
            "{model}: {held} bytes, declared are {}",
            declared.weight_bytes
        );
        let is_held = model != "goldens/qwen3-gptq_act";
        assert!((declared.dequantised_bytes > declared.weight_bytes) == is_held, "{model}: {declared:?}");
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
    for (changes, quantize, bound) in [
        (&whole_groups, Quantize::Int8, 0.0002),
        (&json!({"vocab_size": 96}), Quantize::Int8, 0.013),
        // Activations have a scale per 32 inputs instead of 128, and more of them round to another value.
        (&whole_groups, Quantize::Int4, 0.004),
    ] {
        let dir = dummy(changes);
        let prompts: Vec<Vec<u32>> = (0..PROMPTS)
            .map(|index| prompt(120).iter().map(|token| (token * (2 * index + 1) + index) % 96).collect())
            .collect();
        let run = |size| of_ranks_as(size, dir.path(), Dummy, quantize, |model| logprobs(model, &prompts));
        let one = run(1);
        for size in [2, 4] {
            let many = run(size);
            report(
                &format!("{size} ranks in {quantize:?}"),
                "one",
                one.len(),
                &Deviation::between(&many, &one),
            );
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
    let (stored, int8, int4) = (bytes(Quantize::None), bytes(Quantize::Int8), bytes(Quantize::Int4));
    assert!((0.5..0.54).contains(&(int8 / stored)), "{int8} bytes of {stored}");
    // The embedding and the LM head, which have eight bits, are two thirds of the weights.
    assert!((0.4..0.46).contains(&(int4 / stored)), "{int4} bytes of {stored}");
    for (quantize, name) in [(Quantize::Int8, "int8"), (Quantize::Int4, "int4")] {
        let model = loaded_as(dir.path(), Dummy, quantize);
        assert!(model.describe().contains(name), "{}", model.describe());
    }
}

/// A rank's share of the inputs that cuts a group of weights in four bits is refused, by the name of the tensor.
#[test]
fn shares_that_cut_a_group_of_int4_are_refused() {
    let dir = dummy(&json!({"intermediate_size": 96, "vocab_size": 96}));
    let options = options(dir.path(), Dummy, Quantize::Int4);
    let group = |world_size| GroupRank { rank: 0, world_size };
    assert!(footprints(&options, 1).is_ok());
    let refused = footprints(&options, 2).unwrap_err().to_string();
    assert!(
        refused.contains("quantize int4: a rank's 48 of 96 inputs") && refused.contains("down_proj"),
        "{refused}"
    );
    let loaded =
        try_load_as(device().with_group(Box::new(Lone(group(2)))), dir.path(), Dummy, Quantize::Int4);
    let Err(refused) = loaded.map(|_| ()) else { panic!("48 inputs per rank are taken") };
    assert!(refused.to_string().contains("down_proj"), "{refused}");
}
