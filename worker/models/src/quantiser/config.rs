//! The `quantization_config` that compressed-tensors reads. Activations in eight bits are quantised per token as they
//! come, so no calibration is needed.

use serde_json::{Value, json};

use super::QuantiserScheme;

/// Returns the section for a checkpoint whose linear layers are quantised, except those of `ignored`.
pub(super) fn section(scheme: QuantiserScheme, ignored: &[String]) -> Value {
    let (format, kind, bits, strategy, group) = match scheme {
        QuantiserScheme::Int4 { group } => ("pack-quantized", "int", 4, "group", Some(group)),
        QuantiserScheme::Int8 => ("int-quantized", "int", 8, "channel", None),
        QuantiserScheme::Fp8 => ("float-quantized", "float", 8, "channel", None),
    };
    let activations = (bits == 8).then(
        || json!({ "num_bits": 8, "type": kind, "symmetric": true, "strategy": "token", "dynamic": true }),
    );
    json!({
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": format,
        "config_groups": { "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": bits, "type": kind, "symmetric": true, "strategy": strategy, "group_size": group,
                "dynamic": false,
            },
            "input_activations": activations,
        } },
        "ignore": ignored,
    })
}
