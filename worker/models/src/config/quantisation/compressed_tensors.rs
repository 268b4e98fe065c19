//! The configs of compressed-tensors: groups of modules, each with its scheme.

use serde_json::Value;

use super::{Group, MAX_GROUP, MAX_MODULES, Modules, Nvfp4, Scales, Scheme};
use crate::{
    LoadError,
    config::keys::{Entries, Key, Keys},
};

/// Formats by name. `mixed-precision` means that each group has its own.
const FORMATS: &[&str] = &[
    "naive-quantized",
    "float-quantized",
    "int-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
];
const FORMAT: Key<String> = Key::choice("format", FORMATS);
const STATUS: Key<String> = Key::choice("quantization_status", &["compressed", "frozen"]);
const CONFIG_GROUPS: &str = "config_groups";
const TRANSFORM_CONFIG: Key<Value> = Key::any("transform_config");
const SPARSITY_CONFIG: &str = "sparsity_config";
const SPARSITY_FORMAT: Key<String> = Key::choice("format", &["dense"]);
const TARGETS: Key<Vec<String>> = Key::texts("targets", MAX_MODULES);
const WEIGHTS: &str = "weights";

const NUM_BITS: Key<usize> = Key::size("num_bits", 8);
const TYPE: Key<String> = Key::choice("type", &["int", "float"]);
const SYMMETRIC: Key<bool> = Key::flag("symmetric");
const STRATEGIES: &[&str] = &["tensor", "channel", "group", "block", "tensor_group"];
const STRATEGY: Key<String> = Key::choice("strategy", STRATEGIES);
const GROUP_SIZE: Key<Value> = Key::any("group_size");
const BLOCK_STRUCTURE: Key<Vec<usize>> = Key::integers("block_structure", Entries::Exactly(2), MAX_GROUP);

/// Reads the groups of modules.
pub(super) fn groups(section: &Keys<'_>) -> Result<Vec<Group>, LoadError> {
    let format = section.get(&FORMAT)?;
    section.get(&STATUS)?;
    match section.get(&TRANSFORM_CONFIG)? {
        None => {}
        Some(Value::Object(transforms)) if transforms.is_empty() => {}
        Some(_) => return Err(section.invalid(&TRANSFORM_CONFIG, "transforms of weights are not supported")),
    }
    section.section(SPARSITY_CONFIG)?.get(&SPARSITY_FORMAT)?;
    let all = section.section(CONFIG_GROUPS)?;
    if all.is_empty() {
        return Err(section.in_file(format!("{}.{CONFIG_GROUPS}: is missing", section.name())));
    }
    let mut groups = Vec::new();
    for name in all.objects() {
        let group = all.section(name)?;
        let weights = group.section(WEIGHTS)?;
        if weights.is_missing() {
            // A group of activations only.
            continue;
        }
        let targets = Modules::parse(&group.need(&TARGETS)?).map_err(|why| group.invalid(&TARGETS, why))?;
        let format = group.get(&FORMAT)?.or_else(|| format.clone());
        groups.push(Group { targets, scheme: scheme(&weights, format.as_deref())? });
    }
    Ok(groups)
}

/// Reads the scheme of a group.
fn scheme(weights: &Keys<'_>, format: Option<&str>) -> Result<Scheme, LoadError> {
    let bits = weights.need(&NUM_BITS)?;
    let kind = weights.get(&TYPE)?.unwrap_or_else(|| "int".into());
    let symmetric = weights.get_or(&SYMMETRIC, true)?;
    let scales = scales(weights)?;
    let refuse = |problem: String| Err(weights.invalid(&NUM_BITS, problem));
    let scheme = match (kind.as_str(), bits, format) {
        ("float", 8, _) => Scheme::Float8 { scale: "weight_scale", scales },
        ("float", 4, Some("mxfp4-pack-quantized")) => Scheme::Mxfp4,
        ("float", 4, Some("nvfp4-pack-quantized")) => Scheme::Nvfp4(Nvfp4::CompressedTensors),
        ("float", 4, _) if scales == Scales::Group(32) => Scheme::Mxfp4,
        ("float", 4, _) if scales == Scales::Group(16) => Scheme::Nvfp4(Nvfp4::CompressedTensors),
        ("int", 2 | 4 | 8, Some("pack-quantized")) => Scheme::Packed { bits, scales, symmetric },
        ("int", 8, Some("int-quantized" | "naive-quantized")) => Scheme::Int8 { scales, symmetric },
        ("int", 2 | 4, Some("mixed-precision") | None) => Scheme::Packed { bits, scales, symmetric },
        _ => {
            let format = format.unwrap_or("none");
            return refuse(format!("{bits} bits of type {kind} in the format {format} are not supported"));
        }
    };
    let is_float = kind == "float";
    if is_float && !symmetric {
        return Err(weights.invalid(&SYMMETRIC, "false is not supported for floats"));
    }
    match (scheme, scales) {
        (Scheme::Mxfp4, Scales::Group(32)) | (Scheme::Nvfp4(_), Scales::Group(16)) => {}
        (Scheme::Mxfp4 | Scheme::Nvfp4(_), _) => {
            return Err(weights.invalid(&GROUP_SIZE, format!("{scales:?} does not fit {scheme}")));
        }
        (Scheme::Packed { .. }, Scales::Block(_)) => {
            return Err(weights.invalid(&STRATEGY, format!("block does not fit {scheme}")));
        }
        _ => {}
    }
    Ok(scheme)
}

fn scales(weights: &Keys<'_>) -> Result<Scales, LoadError> {
    let group = super::group_size(weights)?;
    let strategy = match weights.get(&STRATEGY)? {
        Some(strategy) => strategy,
        None if group.is_some() => "group".into(),
        // As in compressed-tensors, a size of -1 means whole rows.
        None if weights.has(&GROUP_SIZE) => "channel".into(),
        None => "tensor".into(),
    };
    Ok(match strategy.as_str() {
        "tensor" => Scales::Tensor,
        "channel" => Scales::Channel,
        "block" => match weights.need(&BLOCK_STRUCTURE)?[..] {
            [rows, columns] if rows > 0 && columns > 0 => Scales::Block([rows, columns]),
            _ => return Err(weights.invalid(&BLOCK_STRUCTURE, "has no elements")),
        },
        _ => Scales::Group(group.ok_or_else(|| weights.missing(&GROUP_SIZE))?),
    })
}
