//! The scales of keys and values that a checkpoint may have for a KV cache in fp8.

use safetensors::tensor::Dtype;
use tutti_kernels::KvScales;
use tutti_runtime::gguf;

use super::{SafetensorsDir, Source};
use crate::{
    LoadError, LoadOptions,
    config::{ConfigFile, keys::Key, quantisation::QUANTIZATION_CONFIG},
};

/// Names of the scales of keys and of values in an attention module. The first pair of which a tensor exists holds.
const NAMES: [[&str; 2]; 4] = [
    // compressed-tensors, and FP8 checkpoints.
    ["k_scale", "v_scale"],
    // ModelOpt.
    ["k_proj.k_scale", "v_proj.v_scale"],
    // Quark.
    ["k_proj.output_scale", "v_proj.output_scale"],
    // One scale for both.
    ["kv_scale", "kv_scale"],
];

const KV_CACHE_SCHEME: &str = "kv_cache_scheme";
const NUM_BITS: Key<usize> = Key::size("num_bits", 8);
const TYPE: Key<String> = Key::choice("type", &["float"]);
const STRATEGY: Key<String> = Key::choice("strategy", &["tensor"]);
const SYMMETRIC: Key<bool> = Key::flag("symmetric");
const DYNAMIC: Key<bool> = Key::flag("dynamic");
/// The name that ModelOpt has for the scheme.
const KV_CACHE_QUANT_ALGO: Key<String> = Key::choice("kv_cache_quant_algo", &["FP8"]);

/// Least and greatest scale, so that products with a scale neither overflow nor vanish.
const RANGE: (f32, f32) = (1.0 / (1_u64 << 60) as f32, (1_u64 << 60) as f32);

/// Returns the scales of these attention modules for keys and values in fp8. Empty if the checkpoint has none, so that
/// all are 1. Refuses a checkpoint whose scales are for another form.
pub(crate) fn read(
    source: &Source,
    modules: &[String],
    options: &LoadOptions,
) -> Result<Vec<KvScales>, LoadError> {
    let Source::Files(files) = source else { return Ok(Vec::new()) };
    let has_scheme = !gguf::is_file(&options.dir) && check_scheme(&ConfigFile::read(&options.dir)?)?;
    let scales = modules.iter().map(|module| of_module(files, module)).collect::<Result<Vec<_>, _>>()?;
    if scales.iter().all(Option::is_none) {
        if has_scheme {
            tracing::warn!(
                "{KV_CACHE_SCHEME} names scales of keys and values, but there are none: all are 1"
            );
        }
        return Ok(Vec::new());
    }
    let missing = |module: &String| LoadError::Tensor {
        path: options.dir.clone(),
        name: format!("{module}.{}", NAMES[0][0]),
        problem: "is missing, but other layers have scales of keys and values".into(),
    };
    modules.iter().zip(scales).map(|(module, scales)| scales.ok_or_else(|| missing(module))).collect()
}

/// Notes that the model knows the scales of these modules.
pub(crate) fn mark_used(source: &mut Source, modules: &[String]) {
    for module in modules {
        for name in NAMES.as_flattened() {
            source.mark_used(&format!("{module}.{name}"));
        }
    }
}

/// Refuses a checkpoint whose config says that keys and values are not in fp8 with one static scale per tensor. Returns
/// whether the config has such a scheme.
fn check_scheme(file: &ConfigFile) -> Result<bool, LoadError> {
    let config = file.keys().section(QUANTIZATION_CONFIG)?;
    if config.is_missing() {
        return Ok(false);
    }
    let of_modelopt = config.get(&KV_CACHE_QUANT_ALGO)?.is_some();
    let scheme = config.section(KV_CACHE_SCHEME)?;
    if scheme.is_missing() {
        return Ok(of_modelopt);
    }
    scheme.get(&TYPE)?;
    scheme.get(&STRATEGY)?;
    for (key, supported) in [(&SYMMETRIC, true), (&DYNAMIC, false)] {
        if scheme.get(key)? == Some(!supported) {
            return Err(
                scheme.invalid(key, format!("{} is not supported; supported: {supported}", !supported))
            );
        }
    }
    match scheme.get(&NUM_BITS)? {
        None | Some(8) => Ok(true),
        Some(other) => Err(scheme.invalid(&NUM_BITS, format!("{other} is not supported; supported: 8"))),
    }
}

/// Returns the scales of a module; `None` if the files have none.
fn of_module(files: &SafetensorsDir, module: &str) -> Result<Option<KvScales>, LoadError> {
    let has = |name: &str| files.has(&format!("{module}.{name}"));
    let Some([key, value]) = NAMES.into_iter().find(|names| names.iter().any(|name| has(name))) else {
        return Ok(None);
    };
    Ok(Some(KvScales { key: scale(files, module, key)?, value: scale(files, module, value)? }))
}

/// Reads a tensor that is one scale.
fn scale(files: &SafetensorsDir, module: &str, name: &str) -> Result<f32, LoadError> {
    let name = format!("{module}.{name}");
    let Some(tensor) = files.raw(&name) else {
        let problem = "is missing, but the layer has another scale of keys or values".into();
        return Err(LoadError::Tensor { path: files.path().into(), name, problem });
    };
    if ![Dtype::F32, Dtype::F16, Dtype::BF16].contains(&tensor.dtype) {
        return Err(tensor.fault(format!("is of type {}; supported: F32, F16, BF16", tensor.dtype)));
    }
    if !tensor.shape.iter().all(|&size| size == 1) {
        let shape = tensor.shape;
        return Err(
            tensor.fault(format!("has shape {shape:?}, but a layer has one scale of keys and one of values"))
        );
    }
    match tensor.float(0) {
        scale if (RANGE.0..=RANGE.1).contains(&scale) => Ok(scale),
        scale => Err(tensor.fault(format!("is {scale}, but a scale is from 2^-60 to 2^60"))),
    }
}
