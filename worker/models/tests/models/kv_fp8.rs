//! Tests of keys and values in fp8: against transformers with a cache that rounds in the same way, their independence
//! of batches and chunks, the transfer of their pages, and the scales of checkpoints.

use std::{fs, path::Path};

use crate::common::{
    PAGES, Request, SLOTS, Tensor, bits, config, device, generate,
    goldens::{Case, LENGTHS, bound},
    group::of_ranks_with,
    options, prompt, requests, step, tensors, try_load_with, write_config, write_tensors,
};
use safetensors::{SafeTensors, tensor::Dtype};
use serde_json::json;
use tutti_kernels::TokenScore;
use tutti_models::{
    KvCacheDtype,
    LoadFormat::{Auto, Dummy},
    LoadOptions, Model, Quantize, footprints,
};
use tutti_proto::{cluster::v1::ElementType, declaration::PlaneKind};

/// Share of the logprobs that may be further from the reference than the bound. A key or value that lies between two
/// floats of eight bits, at a distance from their middle as small as the error of a sum in f32, is rounded to the one
/// by the reference and to the other here. All later tokens of its prompt read it, so one such value moves several
/// logprobs: on AVX2, whose sums have another order than those of AVX-512, 8 of 465 of a model, by 5.5e-4 at most.
const ROUNDED_OTHERWISE: f64 = 0.03;

fn with(kv_cache_dtype: KvCacheDtype, dir: &Path, load_format: tutti_models::LoadFormat) -> LoadOptions {
    LoadOptions { kv_cache_dtype, ..options(dir, load_format, Quantize::None) }
}

/// Golden models whose checkpoints have scales, on one and two ranks, which tests/formats/generate made. Chunks and
/// other requests in the batch change no bit. Also prints how far fp8 is from keys and values in f32 and in bfloat16.
#[test]
fn goldens_of_a_cache_in_fp8() {
    let Some(root) = std::env::var_os("QUANTISED_FORMATS") else {
        eprintln!("skipped: QUANTISED_FORMATS is not set");
        return;
    };
    let mut models = 0;
    for entry in fs::read_dir(Path::new(&root).join("goldens-kv")).unwrap() {
        let dir = entry.unwrap().path();
        let name = dir.file_name().unwrap().to_str().unwrap().to_owned();
        let bytes = fs::read(dir.join("goldens.safetensors")).unwrap();
        let goldens = SafeTensors::deserialize(&bytes).unwrap();
        let cases: Vec<Case> = LENGTHS.iter().map(|&length| Case::read(&goldens, length)).collect();
        let prompts: Vec<&[u32]> = cases.iter().map(|case| &case.prompt[..]).collect();
        let run = |ranks, dtype, chunk: usize| {
            of_ranks_with(ranks, &with(dtype, &dir, Auto), |model| generate(model, &prompts, chunk, 16))
        };
        let [full, bf16] = [KvCacheDtype::Auto, KvCacheDtype::Bf16].map(|dtype| run(1, dtype, usize::MAX));
        for ranks in [1, 2] {
            let first = run(ranks, KvCacheDtype::Fp8, usize::MAX);
            let mut off = Vec::new();
            for (case, (tokens, scores)) in cases.iter().zip(&first) {
                assert_eq!(*tokens, case.greedy, "{name}, {ranks} ranks, a prompt of {}", case.prompt.len());
                let reference = (1..).map(|token| case.logprob(token));
                off.extend(
                    scores.iter().zip(reference).map(|(score, want)| (f64::from(score.logprob) - want).abs()),
                );
            }
            let [mean, greatest] = mean_and_greatest(&off);
            let beyond = off.iter().filter(|off| **off > bound(&name)).count();
            eprintln!(
                "{name}, {ranks} ranks: |Δ logprob| mean {mean:.2e}, greatest {greatest:.2e}, {beyond} of {} beyond",
                off.len()
            );
            let bound = bound(&name);
            assert!(mean < bound / 4.0 && beyond as f64 <= ROUNDED_OTHERWISE * off.len() as f64, "{name}");
            if ranks == 1 {
                let [of_full, of_bf16] =
                    [&full, &bf16].map(|other| mean_and_greatest(&differences(&first, other)));
                for (type_name, [mean, greatest]) in [("f32", of_full), ("bf16", of_bf16)] {
                    eprintln!(
                        "{name}: fp8 is {mean:.1e} from {type_name} on average, at most {greatest:.1e}"
                    );
                }
                assert!(of_full[0] > bound, "{name}: a cache in fp8 has the numbers of one in f32");
            }
            for chunk in [1, 7, 64] {
                let chunked = run(ranks, KvCacheDtype::Fp8, chunk);
                assert!(bits(&chunked) == bits(&first), "{name}, {ranks} ranks: chunks of {chunk} differ");
            }
            let alone = of_ranks_with(ranks, &with(KvCacheDtype::Fp8, &dir, Auto), |model| {
                let alone = prompts.iter().flat_map(|prompt| generate(model, &[prompt], 32, 16));
                alone.collect::<Vec<_>>()
            });
            assert!(bits(&alone) == bits(&first), "{name}, {ranks} ranks: batch-mates make a difference");
        }
        models += 1;
    }
    assert_eq!(models, 6);
}

fn mean_and_greatest(off: &[f64]) -> [f64; 2] {
    [off.iter().sum::<f64>() / off.len() as f64, off.iter().copied().fold(0.0, f64::max)]
}

/// The differences of the logprobs of all prompt tokens.
fn differences(one: &[(Vec<u32>, Vec<TokenScore>)], other: &[(Vec<u32>, Vec<TokenScore>)]) -> Vec<f64> {
    let logprobs = |runs: &[(Vec<u32>, Vec<TokenScore>)]| -> Vec<f64> {
        runs.iter().flat_map(|(_, scores)| scores).map(|score| f64::from(score.logprob)).collect()
    };
    logprobs(one).iter().zip(logprobs(other)).map(|(one, other)| (one - other).abs()).collect()
}

/// Families with attention: dense, with experts, and with delta nets, whose state keeps its type.
fn families() -> [serde_json::Value; 3] {
    [
        json!({}),
        json!({
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
            "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        }),
        json!({
            "architectures": ["Qwen3_5ForCausalLM"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 24, "num_hidden_layers": 4,
        }),
    ]
}

#[test]
fn chunks_and_batch_mates_change_no_bit_in_any_type_of_weights() {
    for changes in families() {
        for dtype in ["float32", "float16", "bfloat16"] {
            let (dir, mut changes) = (tempfile::tempdir().unwrap(), changes.clone());
            changes["torch_dtype"] = json!(dtype);
            write_config(dir.path(), &config(&changes));
            let mut model = loaded(&with(KvCacheDtype::Fp8, dir.path(), Dummy));
            let prompts: Vec<Vec<u32>> = [1, 9, 64, 150].map(prompt).into();
            let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
            let alone: Vec<_> =
                prompts.iter().flat_map(|prompt| generate(&mut *model, &[prompt], usize::MAX, 8)).collect();
            for chunk in [1, 7, 64, usize::MAX] {
                let batched = generate(&mut *model, &prompts, chunk, 8);
                assert!(bits(&batched) == bits(&alone), "{changes}: chunks of {chunk} differ");
            }
        }
    }
}

fn loaded(options: &LoadOptions) -> Box<dyn Model> {
    let mut model = try_load_with(device(), options).unwrap();
    model.allocate_planes(PAGES, SLOTS).unwrap();
    model
}

const PROMPT: usize = 40;

/// Prefills a request, and returns its pages and the request.
fn prefilled(model: &mut dyn Model) -> (Vec<u8>, Request) {
    let prompt: Vec<u32> = prompt(PROMPT).iter().map(|token| token % 96).collect();
    let mut request = requests(&[&prompt]).remove(0);
    while request.tokens.len() == PROMPT {
        step(model, std::slice::from_mut(&mut request), 24);
    }
    let mut pages = Vec::new();
    model.read_pages(&request.pages[..PROMPT.div_ceil(16)], &mut pages).unwrap();
    (pages, request)
}

/// Decodes eight tokens, and returns all tokens.
fn go_on(model: &mut dyn Model, request: &mut Request) -> Vec<u32> {
    while request.tokens.len() < PROMPT + 8 {
        step(model, std::slice::from_mut(request), usize::MAX);
    }
    request.tokens.clone()
}

#[test]
fn pages_in_fp8_go_from_a_group_to_another() {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), &config(&json!({"vocab_size": 96})));
    let options = with(KvCacheDtype::Fp8, dir.path(), Dummy);
    for from in [1, 2] {
        let (pages, request, whole) = of_ranks_with(from, &options, |model| {
            let (pages, mut request) = prefilled(model);
            let sent = request.clone();
            (pages, sent, go_on(model, &mut request))
        });
        // Two layers of two heads of sixteen elements, with keys and values of sixteen tokens per page.
        assert_eq!(pages.len(), PROMPT.div_ceil(16) * 2 * 2 * 2 * 16 * 16);
        for to in [1, 2] {
            of_ranks_with(to, &options, |model| {
                let mut request = request.clone();
                request.pages.iter_mut().for_each(|page| page.0 -= 100);
                model.write_pages(&request.pages[..PROMPT.div_ceil(16)], &pages).unwrap();
                assert_eq!(go_on(model, &mut request), whole, "{from} to {to} ranks");
            });
        }
    }
}

/// A checkpoint with these scales besides its weights: names in an attention module, and values.
fn checkpoint(scales: &[(usize, &str, f32)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), &config(&json!({})));
    let mut tensors = tensors();
    for (layer, name, scale) in scales {
        let tensor: Tensor = (Dtype::F32, vec![1], scale.to_le_bytes().to_vec());
        tensors.insert(format!("model.layers.{layer}.self_attn.{name}"), tensor);
    }
    write_tensors(&dir.path().join("model.safetensors"), &tensors);
    dir
}

/// Asserts that a checkpoint is refused, by the check of its headers and by loading, for a reason with these words.
fn refuses(dir: &Path, words: &[&str]) {
    let options = with(KvCacheDtype::Fp8, dir, Auto);
    let errors = [
        try_load_with(device(), &options).err().expect("loads, though it must not"),
        footprints(&options, 1).unwrap_err(),
    ];
    for error in errors.map(|error| error.to_string()) {
        assert!(words.iter().all(|word| error.contains(word)), "{error:?} lacks one of {words:?}");
    }
    try_load_with(device(), &with(KvCacheDtype::Auto, dir, Auto)).unwrap();
}

#[test]
fn scales_that_are_no_scales_are_refused_by_name() {
    let all = |name: [&'static str; 2], [key, value]: [f32; 2]| {
        checkpoint(&[(0, name[0], 0.5), (0, name[1], 0.5), (1, name[0], key), (1, name[1], value)])
    };
    let names = ["k_scale", "v_scale"];
    refuses(all(names, [0.0, 1.0]).path(), &["model.layers.1.self_attn.k_scale", "is 0"]);
    refuses(all(names, [1.0, -2.0]).path(), &["model.layers.1.self_attn.v_scale", "is -2"]);
    refuses(all(names, [f32::NAN, 1.0]).path(), &["model.layers.1.self_attn.k_scale", "NaN"]);
    refuses(all(names, [1.0, f32::INFINITY]).path(), &["model.layers.1.self_attn.v_scale", "is inf"]);
    refuses(checkpoint(&[(0, "k_scale", 1.0)]).path(), &["model.layers.0.self_attn.v_scale", "is missing"]);
    let one_layer = checkpoint(&[(0, "k_scale", 1.0), (0, "v_scale", 1.0)]);
    refuses(one_layer.path(), &["model.layers.1.self_attn.k_scale", "is missing", "other layers"]);

    let dir = all(names, [0.5; 2]);
    let mut tensors = tensors();
    for name in ["k_scale", "v_scale"] {
        let tensor: Tensor = (Dtype::F32, vec![2], [0.5f32; 2].map(f32::to_le_bytes).concat());
        tensors.insert(format!("model.layers.0.self_attn.{name}"), tensor);
    }
    write_tensors(&dir.path().join("model.safetensors"), &tensors);
    refuses(dir.path(), &["model.layers.0.self_attn.k_scale", "shape [2]"]);
}

#[test]
fn a_scheme_of_another_form_is_refused_by_its_key() {
    let scheme = |scheme: serde_json::Value| {
        let dir = checkpoint(&[]);
        let groups =
            json!({"group_0": {"targets": ["Nothing"], "weights": {"num_bits": 8, "type": "float"}}});
        write_config(
            dir.path(),
            &config(&json!({"quantization_config": {
                "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups,
                "kv_cache_scheme": scheme,
            }})),
        );
        dir
    };
    refuses(scheme(json!({"num_bits": 8, "type": "int"})).path(), &["kv_cache_scheme.type", "int"]);
    refuses(scheme(json!({"num_bits": 4, "type": "float"})).path(), &["kv_cache_scheme.num_bits", "4"]);
    let heads = json!({"num_bits": 8, "type": "float", "strategy": "attn_head"});
    refuses(scheme(heads).path(), &["kv_cache_scheme.strategy", "attn_head"]);
    refuses(scheme(json!({"symmetric": false})).path(), &["kv_cache_scheme.symmetric", "false"]);
    refuses(scheme(json!({"dynamic": true})).path(), &["kv_cache_scheme.dynamic", "true"]);
    let sound = scheme(json!({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": false}));
    loaded(&with(KvCacheDtype::Fp8, sound.path(), Auto));
}

/// The names that writers have are the same scales. Other scales give other answers, another layout and other pages.
#[test]
fn all_names_of_scales_are_read() {
    let of = |names: [&str; 2], [key, value]: [f32; 2]| {
        let layers = [0, 1].iter().flat_map(|&layer| [(layer, names[0], key), (layer, names[1], value)]);
        let dir = checkpoint(&layers.collect::<Vec<_>>());
        let mut model = loaded(&with(KvCacheDtype::Fp8, dir.path(), Auto));
        let run = generate(&mut *model, &[&prompt(50)], usize::MAX, 4);
        (bits(&run), model.page_layout().id())
    };
    let scales = [0.003, 0.002];
    let first = of(["k_scale", "v_scale"], scales);
    assert!(of(["k_proj.k_scale", "v_proj.v_scale"], scales) == first);
    assert!(of(["k_proj.output_scale", "v_proj.output_scale"], scales) == first);
    assert!(of(["kv_scale", "kv_scale"], [0.003; 2]) == of(["k_scale", "v_scale"], [0.003; 2]));
    for other in [[0.003, 0.003], [0.002, 0.002]] {
        let other = of(["k_scale", "v_scale"], other);
        assert!(other.0 != first.0 && other.1 != first.1);
    }
}

#[test]
fn a_page_is_half_of_one_in_bf16_and_the_declaration_names_its_type() {
    for changes in families() {
        let dir = tempfile::tempdir().unwrap();
        write_config(dir.path(), &config(&changes));
        let of = |dtype| {
            let options = with(dtype, dir.path(), Dummy);
            let model = loaded(&options);
            let element_type = model.declaration().planes().iter().find_map(|plane| match plane.kind {
                PlaneKind::Paged { element_type, bytes_per_entry, .. } => {
                    Some((element_type, bytes_per_entry))
                }
                PlaneKind::Slot { .. } => None,
            });
            let footprint = footprints(&options, 1).unwrap()[0];
            assert_eq!(footprint.page_bytes, model.page_bytes() as u64);
            let (element_type, bytes) = element_type.unwrap();
            (element_type, bytes, footprint.page_bytes, footprint.slot_bytes, model.page_layout().id())
        };
        let (full, bf16, fp8) = (of(KvCacheDtype::Auto), of(KvCacheDtype::Bf16), of(KvCacheDtype::Fp8));
        assert_eq!([full.0, bf16.0, fp8.0], [ElementType::F32, ElementType::Bf16, ElementType::Fp8]);
        assert_eq!((2 * fp8.1, 2 * fp8.2, fp8.3), (bf16.1, bf16.2, bf16.3));
        assert_eq!((4 * fp8.1, 4 * fp8.2, fp8.3), (full.1, full.2, full.3));
        assert!(full.4 != bf16.4 && bf16.4 != fp8.4 && full.4 != fp8.4);
    }
}
