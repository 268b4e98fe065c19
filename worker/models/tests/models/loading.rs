//! Tests of loading sound and damaged checkpoints.

use std::{collections::BTreeMap, fs, path::Path};

use crate::common::{
    Tensor, config, generate, group::of_ranks_with_whole_experts, loaded, options, tensors, try_load,
    try_load_on, unscreened_device, write_config, write_tensors,
};
use safetensors::tensor::Dtype;
use serde_json::json;
use tempfile::TempDir;
use tutti_models::{
    Footprint,
    LoadFormat::{Auto, Dummy},
    LoadOptions, Model, Quantize, check_config, footprints,
};
use tutti_runtime::{Error, ErrorKind};

/// Returns a sound checkpoint in one file, which a test may damage.
fn checkpoint() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), &config(&json!({})));
    write_tensors(&dir.path().join("model.safetensors"), &tensors());
    dir
}

/// Asserts that loading fails with an error about the checkpoint. The error's message must contain all of `words`.
fn refuses(dir: &Path, words: &[&str]) {
    let error = try_load(dir, Auto).err().expect("loads, though it must not");
    let error = Error::from(error);
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    for word in words {
        assert!(error.message().contains(word), "{word:?} is not in {:?}", error.message());
    }
}

/// Returns a checkpoint in which one tensor is changed.
fn with_tensor(change: impl FnOnce(&mut Tensor)) -> TempDir {
    let dir = checkpoint();
    let mut tensors = tensors();
    change(tensors.get_mut("model.layers.1.self_attn.k_proj.weight").unwrap());
    write_tensors(&dir.path().join("model.safetensors"), &tensors);
    dir
}

#[test]
fn shards_give_what_one_file_gives() {
    let single = checkpoint();
    let sharded = checkpoint();
    fs::remove_file(sharded.path().join("model.safetensors")).unwrap();
    let tensors = tensors();
    let shard_of = |i: usize| format!("model-{}.safetensors", i % 3);
    for shard in 0..3 {
        let own = tensors.iter().enumerate().filter(|(i, _)| i % 3 == shard).map(|(_, tensor)| tensor);
        write_tensors(&sharded.path().join(shard_of(shard)), own);
    }
    let map: serde_json::Map<_, _> =
        tensors.keys().enumerate().map(|(i, name)| (name.clone(), json!(shard_of(i)))).collect();
    let index = json!({"metadata": {"total_size": 0}, "weight_map": map});
    fs::write(sharded.path().join("model.safetensors.index.json"), index.to_string()).unwrap();

    let prompt: &[u32] = &[5, 90, 17, 3];
    let run = |dir: &Path| generate(&mut *loaded(dir, Auto), &[prompt], 8, 4);
    assert_eq!(run(single.path()), run(sharded.path()));
}

#[test]
fn tied_weights_need_no_lm_head_and_others_do() {
    let dir = checkpoint();
    let mut tensors = tensors();
    tensors.remove("lm_head.weight");
    write_tensors(&dir.path().join("model.safetensors"), &tensors);
    refuses(dir.path(), &["lm_head.weight", "[97, 48]"]);
    write_config(dir.path(), &config(&json!({"tie_word_embeddings": true})));
    let model = try_load_on(unscreened_device(), dir.path(), Auto).unwrap();
    let elements: usize = tensors.values().map(|(_, shape, _)| shape.iter().product::<usize>()).sum();
    assert_eq!(model.weight_bytes(), 4 * elements as u64);
}

/// Embedding models are published as base models, whose tensor names lack the prefix `model.`. The config ties
/// embedding and LM head.
#[test]
fn a_base_model_gives_what_the_model_with_a_head_gives() {
    let whole = checkpoint();
    write_config(whole.path(), &config(&json!({"tie_word_embeddings": true})));
    let base = checkpoint();
    write_config(base.path(), &config(&json!({"tie_word_embeddings": true})));
    let named = tensors().into_iter().map(|(name, tensor)| (name.replacen("model.", "", 1), tensor));
    let mut renamed: BTreeMap<String, Tensor> = named.collect();
    write_tensors(&base.path().join("model.safetensors"), &renamed);
    let prompt: &[u32] = &[5, 90, 17, 3];
    let run = |dir: &Path| generate(&mut *loaded(dir, Auto), &[prompt], 8, 4);
    assert_eq!(run(base.path()), run(whole.path()));

    renamed.remove("layers.1.mlp.up_proj.weight");
    write_tensors(&base.path().join("model.safetensors"), &renamed);
    refuses(base.path(), &["model.layers.1.mlp.up_proj.weight"]);
}

/// Returns a Qwen3.5 with one layer of each kind, either as a text model or together with a vision encoder.
fn hybrid_checkpoint(vision: bool, change: impl FnOnce(&mut BTreeMap<String, Tensor>)) -> TempDir {
    let text = json!({
        "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 1,
        "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
        "full_attention_interval": 2, "max_position_embeddings": 1024, "tie_word_embeddings": true,
    });
    let mut config = if vision { json!({"text_config": text, "tie_word_embeddings": true}) } else { text };
    let architecture = if vision { "Qwen3_5ForConditionalGeneration" } else { "Qwen3_5ForCausalLM" };
    config["architectures"] = json!([architecture]);
    let prefix = if vision { "model.language_model." } else { "model." };
    let mut tensors = BTreeMap::new();
    let mut add = |name: String, shape: &[usize]| {
        let value = |i: usize| ((i * 37 + name.len() * 11) % 61) as f32 / 61.0 - 0.5;
        let bytes = (0..shape.iter().product()).flat_map(|i| value(i).to_le_bytes()).collect();
        let named = if name.starts_with("mtp.") { name.clone() } else { format!("{prefix}{name}") };
        tensors.insert(named, (Dtype::F32, shape.to_vec(), bytes));
    };
    add("embed_tokens.weight".into(), &[97, 48]);
    add("norm.weight".into(), &[48]);
    for layer in 0..2 {
        let mut add = |name: &str, shape: &[usize]| add(format!("layers.{layer}.{name}"), shape);
        add("input_layernorm.weight", &[48]);
        add("post_attention_layernorm.weight", &[48]);
        add("mlp.gate_proj.weight", &[80, 48]);
        add("mlp.up_proj.weight", &[80, 48]);
        add("mlp.down_proj.weight", &[48, 80]);
    }
    for (name, shape) in [
        ("in_proj_qkv.weight", &[40, 48][..]),
        ("in_proj_z.weight", &[24, 48]),
        ("in_proj_b.weight", &[2, 48]),
        ("in_proj_a.weight", &[2, 48]),
        ("conv1d.weight", &[40, 1, 4]),
        ("A_log", &[2]),
        ("dt_bias", &[2]),
        ("norm.weight", &[12]),
        ("out_proj.weight", &[48, 24]),
    ] {
        add(format!("layers.0.linear_attn.{name}"), shape);
    }
    for (name, shape) in [
        ("q_proj", &[64, 48][..]),
        ("k_proj", &[16, 48]),
        ("v_proj", &[16, 48]),
        ("q_norm", &[16]),
        ("k_norm", &[16]),
        ("o_proj", &[48, 32]),
    ] {
        add(format!("layers.1.self_attn.{name}.weight"), shape);
    }
    if vision {
        // The text model does not use these tensors.
        add("mtp.layers.0.mlp.up_proj.weight".into(), &[3, 5]);
    }
    change(&mut tensors);
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), &config);
    write_tensors(&dir.path().join("model.safetensors"), &tensors);
    dir
}

#[test]
fn a_vision_model_gives_what_its_text_model_gives() {
    let run = |vision| {
        let dir = hybrid_checkpoint(vision, |_| ());
        generate(&mut *loaded(dir.path(), Auto), &[&[5, 90, 17, 3]], 8, 6)
    };
    assert_eq!(run(true), run(false));
}

/// If transformers saves only the text model of a vision model, the tensors keep the names of the vision model.
#[test]
fn a_text_model_may_keep_the_names_of_the_vision_model() {
    let plain = hybrid_checkpoint(false, |_| ());
    let renamed = hybrid_checkpoint(false, |tensors| {
        *tensors = std::mem::take(tensors)
            .into_iter()
            .map(|(name, tensor)| (name.replacen("model.", "model.language_model.", 1), tensor))
            .collect();
    });
    let run = |dir: &TempDir| generate(&mut *loaded(dir.path(), Auto), &[&[5, 90, 17, 3]], 8, 6);
    assert_eq!(run(&renamed), run(&plain));
}

#[test]
fn tensors_of_a_delta_net_are_checked_by_name_and_shape() {
    let conv = "model.layers.0.linear_attn.conv1d.weight";
    let dir = hybrid_checkpoint(false, |tensors| drop(tensors.remove(conv)));
    refuses(dir.path(), &[conv, "[40, 1, 4]"]);
    let wider = |tensors: &mut BTreeMap<String, Tensor>| {
        *tensors.get_mut(conv).unwrap() = (Dtype::F32, vec![40, 1, 5], vec![0; 40 * 5 * 4]);
    };
    refuses(hybrid_checkpoint(false, wider).path(), &[conv, "[40, 1, 4]", "[40, 1, 5]"]);
    let q = "model.language_model.layers.1.self_attn.q_proj.weight";
    let dir = hybrid_checkpoint(true, |tensors| drop(tensors.remove(q)));
    refuses(dir.path(), &[q, "[64, 48]"]);
}

#[test]
fn tensors_of_a_shared_expert_are_checked_by_name_and_shape() {
    let checkpoint = |change: &dyn Fn(&mut BTreeMap<String, Tensor>)| {
        let dir = hybrid_checkpoint(true, |tensors| {
            let mut value = |name: String, shape: &[usize]| {
                let bytes = (0..shape.iter().product()).flat_map(|i: usize| (i as f32).sin().to_le_bytes());
                tensors.insert(name, (Dtype::F32, shape.to_vec(), bytes.collect()));
            };
            for layer in 0..2 {
                let mut add = |name: &str, shape: &[usize]| {
                    value(format!("model.language_model.layers.{layer}.mlp.{name}"), shape);
                };
                add("shared_expert.gate_proj.weight", &[24, 48]);
                add("shared_expert.up_proj.weight", &[24, 48]);
                add("shared_expert.down_proj.weight", &[48, 24]);
                add("shared_expert_gate.weight", &[1, 48]);
                add("gate.weight", &[EXPERTS, 48]);
                add("experts.gate_up_proj", &[EXPERTS, 2 * WIDTH, 48]);
                add("experts.down_proj", &[EXPERTS, 48, WIDTH]);
            }
            change(tensors);
        });
        let path = dir.path().join("config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config["architectures"] = json!(["Qwen3_5MoeForConditionalGeneration"]);
        let keys = json!({
            "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH,
            "shared_expert_intermediate_size": 24, "intermediate_size": null,
        });
        config["text_config"].as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        write_config(dir.path(), &config);
        dir
    };
    let run = |dir: TempDir| generate(&mut *loaded(dir.path(), Auto), &[&[5, 90, 17, 3]], 8, 4);
    let sound = run(checkpoint(&|_| ()));
    for (name, shape) in [
        ("shared_expert.up_proj.weight", "[24, 48]"),
        ("shared_expert_gate.weight", "[1, 48]"),
        ("experts.down_proj", "[4, 48, 20]"),
    ] {
        let name = format!("model.language_model.layers.1.mlp.{name}");
        let missing = checkpoint(&|tensors| drop(tensors.remove(&name)));
        refuses(missing.path(), &[&name, shape]);
        // Each tensor affects the result.
        let zero = checkpoint(&|tensors| tensors.get_mut(&name).unwrap().2.fill(0));
        assert!(run(zero) != sound, "{name}");
    }
}

#[test]
fn a_missing_tensor_is_named() {
    let dir = checkpoint();
    let mut tensors = tensors();
    tensors.remove("model.layers.1.mlp.up_proj.weight");
    write_tensors(&dir.path().join("model.safetensors"), &tensors);
    let path = dir.path().to_str().unwrap();
    refuses(dir.path(), &["model.layers.1.mlp.up_proj.weight", "[80, 48]", path]);
    // If the config asks for biases, the checkpoint must contain them.
    write_config(dir.path(), &config(&json!({"attention_bias": true})));
    refuses(dir.path(), &["model.layers.0.self_attn.q_proj.bias"]);
}

#[test]
fn a_shape_that_differs_from_the_config_is_reported_with_both() {
    let dir = with_tensor(|tensor| tensor.1 = vec![16, 96]);
    refuses(
        dir.path(),
        &["model.layers.1.self_attn.k_proj.weight", "model.safetensors", "[16, 96]", "[32, 48]"],
    );
}

#[test]
fn a_type_that_is_not_taken_is_named() {
    let dir = with_tensor(|tensor| tensor.0 = Dtype::I32);
    refuses(dir.path(), &["model.layers.1.self_attn.k_proj.weight", "model.safetensors", "I32", "BF16"]);
    let dir = with_tensor(|tensor| *tensor = (Dtype::BF16, tensor.1.clone(), vec![0; tensor.2.len() / 2]));
    refuses(dir.path(), &["k_proj.weight", "BF16", "q_proj.weight", "F32"]);
}

#[test]
fn truncated_files_are_refused_wherever_they_end() {
    let dir = checkpoint();
    let file = dir.path().join("model.safetensors");
    let whole = fs::read(&file).unwrap();
    for length in [0, 4, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&file, &whole[..length]).unwrap();
        refuses(dir.path(), &["model.safetensors"]);
    }
    refuses(dir.path(), &["truncated", "tensor \""]);
}

#[test]
fn a_tensor_in_two_shards_and_a_missing_shard_are_named() {
    let dir = checkpoint();
    let path = |name: &str| dir.path().join(name);
    fs::rename(path("model.safetensors"), path("a.safetensors")).unwrap();
    refuses(dir.path(), &["neither model.safetensors nor model.safetensors.index.json"]);

    let index = |map: serde_json::Value| {
        fs::write(path("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
    };
    index(json!({"lm_head.weight": "a.safetensors", "model.norm.weight": "b.safetensors"}));
    refuses(dir.path(), &["b.safetensors", "No such file"]);
    write_tensors(&path("b.safetensors"), tensors().iter().filter(|(name, _)| *name == "model.norm.weight"));
    refuses(dir.path(), &["model.norm.weight", "a.safetensors", "b.safetensors"]);
    index(json!({"lm_head.weight": "../a.safetensors"}));
    refuses(dir.path(), &["model.safetensors.index.json", "../a.safetensors"]);
}

#[test]
fn an_unknown_architecture_is_named_beside_what_is_supported() {
    let dir = checkpoint();
    write_config(dir.path(), &config(&json!({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"})));
    let supported = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"];
    refuses(dir.path(), &[&["config.json", "GemmaForCausalLM", "\"gemma\""][..], &supported].concat());
    // Without `architectures`, `model_type` names the family.
    write_config(dir.path(), &config(&json!({"architectures": null})));
    loaded(dir.path(), Auto);
    write_config(dir.path(), &config(&json!({"quantization_config": {"quant_method": "hqq"}})));
    refuses(dir.path(), &["quantization_config.quant_method", "hqq", "compressed-tensors"]);
}

#[test]
fn a_config_that_is_missing_or_no_json_is_named() {
    let dir = checkpoint();
    fs::write(dir.path().join("config.json"), "{").unwrap();
    refuses(dir.path(), &["config.json", "malformed JSON"]);
    fs::remove_file(dir.path().join("config.json")).unwrap();
    refuses(dir.path(), &["config.json", "No such file"]);
}

#[test]
fn dummy_weights_need_the_config_alone() {
    let dir = tempfile::tempdir().unwrap();
    for dtype in ["float32", "float16", "bfloat16"] {
        let tied = json!({"torch_dtype": dtype, "tie_word_embeddings": true, "eos_token_id": [7, 2]});
        write_config(dir.path(), &config(&tied));
        let mut model = loaded(dir.path(), Dummy);
        let elements = 97 * 48 + 48 + 2 * (2 * 48 + 2 * 16 + 2 * 64 * 48 + 2 * 32 * 48 + 3 * 80 * 48);
        let bytes = if dtype == "float32" { 4 } else { 2 };
        let unscreened = try_load_on(unscreened_device(), dir.path(), Dummy).unwrap();
        // The embedding is also the LM head. On paths whose matrix products round to bf16, the LM head has corrections:
        // 16 bytes of marks per token of the vocabulary, and two bytes per rounded weight.
        let corrections = unscreened.weight_bytes() - bytes * elements;
        let few = 97 * 16..97 * 16 + 97 * 48 / 2;
        assert!(corrections == 0 || dtype == "bfloat16" && few.contains(&corrections), "{corrections}");
        // The screen (a compact copy of the LM head) takes little more than a byte per weight.
        let screen = model.weight_bytes() - unscreened.weight_bytes();
        assert!((97 * 48..97 * 48 * 2).contains(&screen), "{screen}");
        assert_eq!(model.limits().eos_token_ids, [2, 7]);
        let run = generate(&mut *model, &[&[1, 2, 3]], 8, 6);
        assert_eq!(run, generate(&mut *loaded(dir.path(), Dummy), &[&[1, 2, 3]], 8, 6), "{dtype}");
        assert!(run[0].1.iter().all(|score| score.logprob.is_finite()), "{dtype}");
    }
}

/// The right values are those of transformers 5.23, which keep an LM head of its own, and tie the two otherwise.
#[test]
fn the_files_say_whether_the_lm_head_is_the_embedding() {
    let prompt: &[u32] = &[5, 90, 17, 3];
    let run = |tie: bool, change: &dyn Fn(&mut BTreeMap<String, Tensor>)| {
        let dir = checkpoint();
        let mut tensors = tensors();
        change(&mut tensors);
        write_tensors(&dir.path().join("model.safetensors"), &tensors);
        write_config(dir.path(), &config(&json!({"tie_word_embeddings": tie})));
        generate(&mut *loaded(dir.path(), Auto), &[prompt], 8, 4)
    };
    let embedding = tensors()["model.embed_tokens.weight"].clone();
    let untied = run(false, &|_| ());
    let tied = run(true, &|tensors| drop(tensors.remove("lm_head.weight")));
    assert_ne!(untied, tied);
    assert_eq!(run(true, &|_| ()), untied);
    let equal = |tensors: &mut BTreeMap<String, Tensor>| {
        tensors.insert("lm_head.weight".into(), embedding.clone());
    };
    assert_eq!(run(true, &equal), tied);
    let alone = |tensors: &mut BTreeMap<String, Tensor>| {
        equal(&mut *tensors);
        tensors.remove("model.embed_tokens.weight");
    };
    assert_eq!(run(true, &alone), tied);
}

const EXPERTS: usize = 4;
/// Intermediate width per expert.
const WIDTH: usize = 20;

/// Returns the tensors of a model whose last layer has experts, stacked or with separate tensors per expert.
fn with_experts(stacked: bool) -> BTreeMap<String, Tensor> {
    let mut tensors = tensors();
    let of_layer = |tensor: &str| format!("model.layers.1.mlp.{tensor}");
    for projection in ["gate", "up", "down"] {
        tensors.remove(&of_layer(&format!("{projection}_proj.weight"))).unwrap();
    }
    let mut add = |name: &str, shape: Vec<usize>, values: Vec<f32>| {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        tensors.insert(of_layer(name), (Dtype::F32, shape, bytes));
    };
    let value = |seed: usize, i: usize| ((i * 37 + seed * 11) % 61) as f32 / 61.0 - 0.5;
    let values = |seed: usize| (0..WIDTH * 48).map(|i| value(seed, i)).collect::<Vec<_>>();
    add("gate.weight", vec![EXPERTS, 48], (0..EXPERTS * 48).map(|i| value(5, i * i)).collect());
    let of_expert = |expert: usize| [0, 1, 2].map(|projection| values(expert * 3 + projection));
    if stacked {
        let gate_up =
            (0..EXPERTS).flat_map(|expert| of_expert(expert).into_iter().take(2).flatten()).collect();
        let down = (0..EXPERTS).flat_map(|expert| of_expert(expert).into_iter().skip(2).flatten()).collect();
        add("experts.gate_up_proj", vec![EXPERTS, 2 * WIDTH, 48], gate_up);
        add("experts.down_proj", vec![EXPERTS, 48, WIDTH], down);
        return tensors;
    }
    for expert in 0..EXPERTS {
        let [gate, up, down] = of_expert(expert);
        add(&format!("experts.{expert}.gate_proj.weight"), vec![WIDTH, 48], gate);
        add(&format!("experts.{expert}.up_proj.weight"), vec![WIDTH, 48], up);
        add(&format!("experts.{expert}.down_proj.weight"), vec![48, WIDTH], down);
    }
    tensors
}

/// Returns a checkpoint of these tensors. The last layer has experts.
fn moe_checkpoint(tensors: &BTreeMap<String, Tensor>) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let keys = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": EXPERTS,
        "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH, "norm_topk_prob": true, "mlp_only_layers": [0],
    });
    write_config(dir.path(), &config(&keys));
    write_tensors(&dir.path().join("model.safetensors"), tensors);
    dir
}

#[test]
fn stacked_experts_give_what_single_ones_give_on_any_division() {
    let dirs = [false, true].map(|stacked| moe_checkpoint(&with_experts(stacked)));
    let prompt: &[u32] = &[5, 90, 17, 3, 41, 41, 8];
    let run = |model: &mut dyn Model| generate(model, &[prompt], 8, 4);
    let [single, stacked] = dirs.each_ref().map(|dir| run(&mut *loaded(dir.path(), Auto)));
    assert_eq!(single, stacked);
    // A group of one rank holds all experts in both divisions.
    let whole =
        dirs.each_ref().map(|dir| of_ranks_with_whole_experts(1, dir.path(), Auto, Quantize::None, run));
    assert!(whole.iter().all(|runs| *runs == single));
}

#[test]
fn damaged_experts_are_named() {
    for (stacked, name, shape) in [
        (false, "model.layers.1.mlp.experts.3.up_proj.weight", "[20, 48]"),
        (false, "model.layers.1.mlp.gate.weight", "[4, 48]"),
        (true, "model.layers.1.mlp.experts.down_proj", "[4, 48, 20]"),
    ] {
        let mut tensors = with_experts(stacked);
        let (_, found, _) = tensors.get_mut(name).unwrap();
        found.reverse();
        let reversed = format!("{found:?}");
        refuses(moe_checkpoint(&tensors).path(), &[name, shape, &reversed]);
        tensors.remove(name).unwrap();
        refuses(moe_checkpoint(&tensors).path(), &[name, shape, "none of its 1"]);
    }
    // Without the stack of gate and up, the loader looks for separate tensors per expert.
    let mut tensors = with_experts(true);
    tensors.remove("model.layers.1.mlp.experts.gate_up_proj").unwrap();
    refuses(moe_checkpoint(&tensors).path(), &["model.layers.1.mlp.experts.0.gate_proj.weight"]);
}

#[test]
fn the_footprint_is_what_the_device_will_hold() {
    let dir = checkpoint();
    for (load_format, quantize) in
        [(Auto, Quantize::None), (Dummy, Quantize::None), (Auto, Quantize::Int8), (Auto, Quantize::Int4)]
    {
        let model =
            crate::common::try_load_as(unscreened_device(), dir.path(), load_format, quantize).unwrap();
        let options = options(dir.path(), load_format, quantize);
        let [whole] = footprints(&options, 1).unwrap()[..] else { panic!("one rank") };
        assert_eq!(whole.page_bytes, model.page_bytes() as u64);
        assert_eq!(whole.slot_bytes, model.declaration().slot_bytes());
        if quantize == Quantize::None {
            assert_eq!(whole.weight_bytes, model.weight_bytes());
        } else {
            // The device pads matrices, so a small one takes more than its elements and scales.
            let (least, most) = (model.weight_bytes() * 2 / 3, model.weight_bytes());
            assert!((least..=most).contains(&whole.weight_bytes), "{} of {most}", whole.weight_bytes);
        }
    }
}

#[test]
fn the_footprint_of_ranks_is_divided_like_the_model() {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), &config(&json!({ "vocab_size": 96 })));
    for quantize in [Quantize::None, Quantize::Int8] {
        let options = options(dir.path(), Dummy, quantize);
        let [whole] = footprints(&options, 1).unwrap()[..] else { panic!("one rank") };
        let ranks = footprints(&options, 2).unwrap();
        let sum = ranks.iter().map(|rank: &Footprint| rank.weight_bytes).sum::<u64>();
        // The ranks divide the matrices, and each holds all norms.
        assert!((whole.weight_bytes..whole.weight_bytes * 5 / 4).contains(&sum), "{sum} and {whole:?}");
        assert!(ranks.iter().all(|rank| rank.weight_bytes < whole.weight_bytes * 2 / 3), "{ranks:?}");
        assert_eq!(2 * ranks[0].page_bytes, whole.page_bytes);
    }
}

#[test]
fn a_checkpoint_is_refused_before_it_is_loaded() {
    let dir = checkpoint();
    write_config(dir.path(), &config(&json!({ "vocab_size": 96 })));
    let check = |ranks, expert_parallel| {
        check_config(&LoadOptions { expert_parallel, ..options(dir.path(), Auto, Quantize::None) }, ranks)
    };
    check(2, false).unwrap();
    let refused = check(3, false).unwrap_err().to_string();
    assert!(refused.contains("config.json") && refused.contains("3"), "{refused}");
    assert!(check(2, true).unwrap_err().to_string().contains("experts"));
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    check(2, false).unwrap();
    let missing = footprints(&options(dir.path(), Auto, Quantize::None), 1).unwrap_err().to_string();
    assert!(missing.contains("holds no weights"), "{missing}");
    fs::write(dir.path().join("pytorch_model.bin"), "").unwrap();
    let foreign = footprints(&options(dir.path(), Auto, Quantize::None), 1).unwrap_err().to_string();
    assert!(foreign.contains("pytorch_model.bin") && foreign.contains("save_pretrained"), "{foreign}");
}

#[test]
fn pointers_of_git_lfs_are_refused_as_such() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n";
    for file in ["model.safetensors", "config.json"] {
        let dir = checkpoint();
        fs::write(dir.path().join(file), pointer).unwrap();
        refuses(dir.path(), &[file, "is a pointer of git-lfs", "git lfs pull"]);
    }
}
