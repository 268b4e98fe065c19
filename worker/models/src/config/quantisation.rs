//! The checked `quantization_config` of a `config.json`: which modules are quantised, and in which scheme.
//!
//! A value that this build does not know is refused by its key. [`compressed_tensors`] reads the configs with groups of
//! modules, and this file the configs with one scheme for all modules.

mod compressed_tensors;
mod modules;

use std::fmt;

use serde_json::Value;
use tutti_kernels::WeightType;

use self::modules::Modules;
use super::{
    keys::{Entries, Key, Keys},
    parse_dtype, ranges,
};
use crate::LoadError;

/// Name of the object in `config.json`.
pub(crate) const QUANTIZATION_CONFIG: &str = "quantization_config";

/// Maximum number of columns or rows that share a scale.
const MAX_GROUP: usize = ranges::MAX_WIDTH;
/// Maximum number of names of modules in a list.
const MAX_MODULES: usize = 1 << 17;

const QUANT_METHOD: Key<String> = Key::choice(
    "quant_method",
    &["fp8", "compressed-tensors", "awq", "gptq", "modelopt", "modelopt_fp4", "bitsandbytes"],
);
const MODULES_TO_NOT_CONVERT: Key<Vec<String>> = Key::texts("modules_to_not_convert", MAX_MODULES);
const IGNORED_LAYERS: Key<Vec<String>> = Key::texts("ignored_layers", MAX_MODULES);
const IGNORE: Key<Vec<String>> = Key::texts("ignore", MAX_MODULES);
const EXCLUDE_MODULES: Key<Vec<String>> = Key::texts("exclude_modules", MAX_MODULES);

const WEIGHT_BLOCK_SIZE: Key<Vec<usize>> = Key::integers("weight_block_size", Entries::Exactly(2), MAX_GROUP);
const FMT: Key<String> = Key::choice("fmt", &["e4m3", "float8_e4m3fn"]);
const ACTIVATION_SCHEME: Key<String> = Key::choice("activation_scheme", &["dynamic", "static"]);

const AWQ_BITS: Key<usize> = Key::size("bits", 4);
const AWQ_VERSION: Key<String> = Key::choice("version", &["gemm", "GEMM"]);
const ZERO_POINT: Key<bool> = Key::flag("zero_point");

const GPTQ_BITS: Key<usize> = Key::size("bits", 8);
const CHECKPOINT_FORMAT: Key<String> = Key::choice("checkpoint_format", &["gptq", "gptq_v2"]);
const GROUP_SIZE: Key<Value> = Key::any("group_size");
const DYNAMIC: Key<Value> = Key::any("dynamic");

const QUANT_ALGO: Key<String> = Key::choice("quant_algo", &["NVFP4", "FP8"]);

const LOAD_IN_4BIT: Key<bool> = Key::flag("load_in_4bit");
const LOAD_IN_8BIT: Key<bool> = Key::flag("load_in_8bit");
const BNB_TYPE: Key<String> = Key::choice("bnb_4bit_quant_type", &["nf4"]);

/// The number of elements that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scales {
    /// All elements.
    Tensor,
    /// A row.
    Channel,
    /// This number of columns of a row. The last group of a row may be shorter.
    Group(usize),
    /// A block of `[rows, columns]`. The last blocks may be smaller.
    Block([usize; 2]),
}

/// The stored form of a quantised matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scheme {
    /// 8-bit floats of type e4m3, with their scales in the tensor of this suffix.
    Float8 { scale: &'static str, scales: Scales },
    /// 8-bit integers, one per byte.
    Int8 { scales: Scales, symmetric: bool },
    /// Integers of `bits` bits, packed into words along the inputs.
    Packed { bits: usize, scales: Scales, symmetric: bool },
    /// Floats of type e2m1 in groups of 32 with a power of two.
    Mxfp4,
    /// Floats of type e2m1 in groups of 16, with two levels of scales.
    Nvfp4(Nvfp4),
    /// The GEMM layout of AWQ: 4 bits, packed along the outputs, transposed. `None`: one group.
    Awq { group: Option<usize> },
    /// GPTQ: packed along the inputs, transposed. A zero point is the stored number plus `zero_offset`.
    Gptq { bits: usize, group: Option<usize>, zero_offset: i16, act_order: bool },
    /// NF4 of bitsandbytes.
    Nf4,
}

/// The library that wrote an NVFP4 checkpoint. The tensor-wide scale of one divides, that of the other multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nvfp4 {
    CompressedTensors,
    ModelOpt,
}

/// The checked `quantization_config`.
#[derive(Clone, Debug)]
pub(crate) struct Quantisation {
    /// Type in which the device holds dequantised matrices: the type that `config.json` names.
    pub dtype: WeightType,
    ignored: Modules,
    groups: Vec<Group>,
}

/// Modules of one scheme.
#[derive(Clone, Debug)]
struct Group {
    targets: Modules,
    scheme: Scheme,
}

impl Quantisation {
    /// Reads the section of the file with the top-level keys `keys`. Returns `None` if the checkpoint is not quantised.
    pub fn read(keys: &Keys<'_>) -> Result<Option<Self>, LoadError> {
        let section = keys.section(QUANTIZATION_CONFIG)?;
        if section.is_missing() {
            return Ok(None);
        }
        let text = keys.section(ranges::TEXT_CONFIG)?;
        let (dtype, torch_dtype) = (&ranges::DTYPE, &ranges::TORCH_DTYPE);
        let names = [keys.get(dtype)?, keys.get(torch_dtype)?, text.get(dtype)?, text.get(torch_dtype)?];
        let dtype = match names.into_iter().flatten().next() {
            Some(name) => parse_dtype(&name).unwrap_or(WeightType::Bf16),
            None => WeightType::Bf16,
        };
        let all = |scheme| vec![Group { targets: Modules::all(), scheme }];
        let groups = match section.need(&QUANT_METHOD)?.as_str() {
            "fp8" => all(fp8(&section)?),
            "awq" => all(awq(&section)?),
            "gptq" => all(gptq(&section)?),
            "bitsandbytes" => all(bitsandbytes(&section)?),
            "modelopt" | "modelopt_fp4" => all(modelopt(&section)?),
            // The rule of `QUANT_METHOD` leaves this one.
            _ => compressed_tensors::groups(&section)?,
        };
        let mut names = Vec::new();
        for key in [&MODULES_TO_NOT_CONVERT, &IGNORED_LAYERS, &IGNORE, &EXCLUDE_MODULES] {
            names.extend(section.get(key)?.unwrap_or_default());
        }
        let ignored = Modules::parse(&names).map_err(|problem| section.invalid(&IGNORE, problem))?;
        Ok(Some(Self { dtype, ignored, groups }))
    }

    /// Returns the scheme of a linear layer; `None` if the config excludes it or names it nowhere.
    pub fn scheme_of(&self, module: &str) -> Option<Scheme> {
        if self.ignored.best(module).is_some() {
            return None;
        }
        let fits = self.groups.iter().filter_map(|group| Some((group.targets.best(module)?, group.scheme)));
        // The first of several groups that match equally well holds.
        fits.reduce(|best, next| if next.0 > best.0 { next } else { best }).map(|(_, scheme)| scheme)
    }
}

fn fp8(section: &Keys<'_>) -> Result<Scheme, LoadError> {
    section.get(&FMT)?;
    section.get(&ACTIVATION_SCHEME)?;
    Ok(match section.get(&WEIGHT_BLOCK_SIZE)?.as_deref() {
        Some(&[rows, columns]) if rows > 0 && columns > 0 => {
            Scheme::Float8 { scale: "weight_scale_inv", scales: Scales::Block([rows, columns]) }
        }
        Some(other) => {
            return Err(section.invalid(&WEIGHT_BLOCK_SIZE, format!("{other:?} has no elements")));
        }
        None => Scheme::Float8 { scale: "weight_scale", scales: Scales::Tensor },
    })
}

fn awq(section: &Keys<'_>) -> Result<Scheme, LoadError> {
    match section.need(&AWQ_BITS)? {
        4 => {}
        other => return Err(section.invalid(&AWQ_BITS, format!("{other} is not supported; supported: 4"))),
    }
    section.get(&AWQ_VERSION)?;
    if section.get(&ZERO_POINT)? == Some(false) {
        return Err(section.invalid(&ZERO_POINT, "false is not supported"));
    }
    Ok(Scheme::Awq { group: group_size(section)? })
}

fn gptq(section: &Keys<'_>) -> Result<Scheme, LoadError> {
    let bits = section.need(&GPTQ_BITS)?;
    if !matches!(bits, 2 | 4 | 8) {
        return Err(section.invalid(&GPTQ_BITS, format!("{bits} is not supported; supported: 2, 4, 8")));
    }
    match section.get(&DYNAMIC)? {
        None => {}
        Some(Value::Object(rules)) if rules.is_empty() => {}
        Some(_) => return Err(section.invalid(&DYNAMIC, "rules for single modules are not supported")),
    }
    let zero_offset = match section.get(&CHECKPOINT_FORMAT)?.as_deref() {
        Some("gptq_v2") => 0,
        _ => 1,
    };
    let act_order = section.get(&Key::flag("desc_act"))?.unwrap_or(false);
    Ok(Scheme::Gptq { bits, group: group_size(section)?, zero_offset, act_order })
}

fn bitsandbytes(section: &Keys<'_>) -> Result<Scheme, LoadError> {
    section.refuse(&LOAD_IN_8BIT)?;
    if section.get(&LOAD_IN_4BIT)? != Some(true) {
        return Err(section.invalid(&LOAD_IN_4BIT, "must be true"));
    }
    section.need(&BNB_TYPE)?;
    Ok(Scheme::Nf4)
}

fn modelopt(section: &Keys<'_>) -> Result<Scheme, LoadError> {
    Ok(match section.need(&QUANT_ALGO)?.as_str() {
        "FP8" => Scheme::Float8 { scale: "weight_scale", scales: Scales::Tensor },
        // The rule of `QUANT_ALGO` leaves NVFP4.
        _ => Scheme::Nvfp4(Nvfp4::ModelOpt),
    })
}

/// Reads `group_size`, where -1 or nothing means one group per row.
fn group_size(section: &Keys<'_>) -> Result<Option<usize>, LoadError> {
    match section.get(&GROUP_SIZE)? {
        None => Ok(None),
        Some(value) if value.as_i64() == Some(-1) => Ok(None),
        Some(value) => match value.as_u64() {
            Some(size) if size >= 1 && size <= MAX_GROUP as u64 => Ok(Some(size as usize)),
            _ => {
                let problem = format!("must be -1 or an integer from 1 to {MAX_GROUP}, not {value}");
                Err(section.invalid(&GROUP_SIZE, problem))
            }
        },
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Float8 { .. } => write!(f, "fp8"),
            Self::Int8 { .. } => write!(f, "int-quantized"),
            Self::Packed { bits, .. } => write!(f, "pack-quantized of {bits} bits"),
            Self::Mxfp4 => write!(f, "mxfp4"),
            Self::Nvfp4(_) => write!(f, "nvfp4"),
            Self::Awq { .. } => write!(f, "awq"),
            Self::Gptq { bits, .. } => write!(f, "gptq of {bits} bits"),
            Self::Nf4 => write!(f, "nf4"),
        }
    }
}

#[cfg(test)]
mod tests;
