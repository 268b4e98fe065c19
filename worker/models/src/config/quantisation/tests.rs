use serde_json::{Value, json};

use super::*;
use crate::config::ConfigFile;

fn read(section: Value) -> Result<Option<Quantisation>, String> {
    let file = ConfigFile::of_value(json!({ "dtype": "float16", "quantization_config": section }));
    Quantisation::read(&file.keys()).map_err(|error| error.to_string())
}

fn scheme(section: Value) -> Option<Scheme> {
    read(section).unwrap().unwrap().scheme_of("model.layers.3.mlp.up_proj")
}

/// A config of compressed-tensors with one group.
fn grouped(format: &str, weights: Value) -> Value {
    let group = json!({ "targets": ["Linear"], "weights": weights, "input_activations": null });
    json!({
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": { "group_0": group }, "ignore": ["lm_head", "re:.*mlp.gate$"],
    })
}

#[test]
fn each_method_has_its_scheme() {
    let fp8 = |changes: Value| {
        let mut section = json!({ "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3" });
        section.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        scheme(section)
    };
    let scales = Scales::Block([128, 128]);
    assert_eq!(
        fp8(json!({ "weight_block_size": [128, 128] })),
        Some(Scheme::Float8 { scale: "weight_scale_inv", scales })
    );
    let scale = "weight_scale";
    assert_eq!(fp8(json!({})), Some(Scheme::Float8 { scale, scales: Scales::Tensor }));
    let awq =
        json!({ "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm" });
    assert_eq!(scheme(awq), Some(Scheme::Awq { group: Some(128) }));
    let gptq = |format: &str| json!({ "quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": true, "checkpoint_format": format });
    let of = |zero_offset| Some(Scheme::Gptq { bits: 8, group: None, zero_offset, act_order: true });
    assert_eq!([scheme(gptq("gptq")), scheme(gptq("gptq_v2"))], [of(1), of(0)]);
    let weights =
        json!({ "num_bits": 4, "type": "int", "symmetric": false, "strategy": "group", "group_size": 32 });
    let packed = Scheme::Packed { bits: 4, scales: Scales::Group(32), symmetric: false };
    assert_eq!(scheme(grouped("pack-quantized", weights)), Some(packed));
    let weights = json!({ "num_bits": 8, "type": "float", "strategy": "channel" });
    let channels = Scheme::Float8 { scale, scales: Scales::Channel };
    assert_eq!(scheme(grouped("float-quantized", weights)), Some(channels));
    let weights = json!({ "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16 });
    let nvfp4 = Scheme::Nvfp4(Nvfp4::CompressedTensors);
    assert_eq!(scheme(grouped("nvfp4-pack-quantized", weights)), Some(nvfp4));
    let modelopt = json!({ "quant_method": "modelopt", "quant_algo": "NVFP4" });
    assert_eq!(scheme(modelopt), Some(Scheme::Nvfp4(Nvfp4::ModelOpt)));
}

#[test]
fn names_and_expressions_exclude_modules() {
    let weights = json!({ "num_bits": 8, "type": "int", "strategy": "channel" });
    let read = read(grouped("int-quantized", weights)).unwrap().unwrap();
    assert_eq!(read.dtype, WeightType::F16);
    for (module, quantised) in [
        ("lm_head", false),
        ("model.layers.0.mlp.gate", false),
        ("model.layers.0.mlp.gate_proj", true),
        ("model.layers.0.self_attn.q_proj", true),
    ] {
        assert_eq!(read.scheme_of(module).is_some(), quantised, "{module}");
    }
}

#[test]
fn a_name_takes_precedence_over_an_expression_and_that_over_a_class() {
    let weights = |bits| json!({ "num_bits": bits, "type": "int", "strategy": "group", "group_size": 32 });
    let group = |target: &str, bits| json!({ "targets": [target], "weights": weights(bits) });
    let section = json!({
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
            "a": group("Linear", 8), "b": group("re:.*down_proj", 4), "c": group("model.layers.1.mlp.down_proj", 2),
        },
    });
    let read = read(section).unwrap().unwrap();
    for (module, expected) in
        [("layers.0.q", 8), ("model.layers.0.mlp.down_proj", 4), ("model.layers.1.mlp.down_proj", 2)]
    {
        match read.scheme_of(module) {
            Some(Scheme::Packed { bits, .. }) => assert_eq!(bits, expected, "{module}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn unknown_values_are_refused_by_key_and_value() {
    let int = |changes: Value| {
        let mut weights = json!({ "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32 });
        weights.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        grouped("pack-quantized", weights)
    };
    let cases = [
        (json!({ "quant_method": "hqq" }), "quantization_config.quant_method", "hqq"),
        (json!({}), "quantization_config.quant_method", "missing"),
        (json!({ "quant_method": "awq", "bits": 4, "version": "gemv" }), "version", "gemv"),
        (json!({ "quant_method": "awq", "bits": 3 }), "bits", "3"),
        (json!({ "quant_method": "gptq", "bits": 3 }), "bits", "3"),
        (json!({ "quant_method": "gptq", "bits": 4, "group_size": 0 }), "group_size", "0"),
        (
            json!({ "quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin" }),
            "checkpoint_format",
            "marlin",
        ),
        (json!({ "quant_method": "gptq", "bits": 4, "dynamic": { "-:x": {} } }), "dynamic", "not supported"),
        (json!({ "quant_method": "fp8", "fmt": "e5m2" }), "fmt", "e5m2"),
        (json!({ "quant_method": "fp8", "weight_block_size": [0, 128] }), "weight_block_size", "[0, 128]"),
        (json!({ "quant_method": "bitsandbytes", "load_in_8bit": true }), "load_in_8bit", "true"),
        (json!({ "quant_method": "modelopt", "quant_algo": "W4A8_AWQ" }), "quant_algo", "W4A8_AWQ"),
        (int(json!({ "strategy": "block" })), "block_structure", "missing"),
        (int(json!({ "num_bits": 3 })), "config_groups.group_0.weights.num_bits", "3 bits"),
        (int(json!({ "strategy": "row" })), "strategy", "row"),
        (json!({ "quant_method": "compressed-tensors", "format": "marlin-24" }), "format", "marlin-24"),
        (
            json!({ "quant_method": "compressed-tensors", "format": "pack-quantized" }),
            "config_groups",
            "missing",
        ),
    ];
    for (section, key, value) in cases {
        let error = read(section.clone()).unwrap_err();
        assert!(error.contains(key) && error.contains(value), "{section}: {error}");
    }
    let mut bad = grouped("int-quantized", json!({ "num_bits": 8, "strategy": "channel" }));
    bad["ignore"] = json!(["re:("]);
    let error = read(bad).unwrap_err();
    assert!(error.contains("ignore") && error.contains("re:("), "{error}");
}
