//! Keys of metadata that change what a model computes, and that are read nowhere else. Their neutral values pass.

use crate::gguf::Header;

/// Keys, and the values with which they change nothing.
const NEUTRAL: [(&str, f64); 11] = [
    ("attention.scale", 0.0),
    ("attention.sliding_window", 0.0),
    ("attention.clamp_kqv", 0.0),
    ("attention.max_alibi_bias", 0.0),
    ("attn_logit_softcapping", 0.0),
    ("final_logit_softcapping", 0.0),
    ("logit_scale", 0.0),
    ("residual_scale", 0.0),
    ("embedding_scale", 0.0),
    ("expert_shared_count", 0.0),
    ("rope.scaling.attn_factor", 1.0),
];

/// Refuses metadata that change the model in a way that is not supported. `key` returns the whole name of a key.
pub(super) fn check(header: &Header, key: &dyn Fn(&str) -> String) -> Result<(), String> {
    for (name, neutral) in NEUTRAL {
        let name = key(name);
        if let Some(found) = header.any_number(&name)?.filter(|&found| found != 0.0 && found != neutral) {
            return Err(format!("{name}: {found} is not supported"));
        }
    }
    let heads = header.integer(&key("attention.head_count"))?.unwrap_or(0);
    let hidden = header.integer(&key("embedding_length"))?.unwrap_or(0);
    let by_width = hidden.checked_div(heads).unwrap_or(0);
    let head = header.integer(&key("attention.key_length"))?.unwrap_or(by_width);
    for name in ["attention.value_length", "rope.dimension_count"] {
        let name = key(name);
        if let Some(found) = header.integer(&name)?.filter(|&found| found != head) {
            return Err(format!("{name}: {found} is not supported; heads have {head} elements"));
        }
    }
    // Without a type, llama.cpp takes a factor as linear scaling.
    if header.text(&key("rope.scaling.type"))?.is_none() {
        for name in ["rope.scaling.factor", "rope.scale_linear"] {
            let name = key(name);
            if let Some(found) = header.any_number(&name)?.filter(|found| ![0.0, 1.0].contains(found)) {
                return Err(format!("{name}: {found} means linear scaling, which is not supported"));
            }
        }
    }
    if header.flag(&key("expert_weights_norm"))? == Some(false) {
        return Err(format!("{}: false is not supported", key("expert_weights_norm")));
    }
    if header.flag(&key("attention.causal"))? == Some(false) {
        return Err(format!("{}: false is not supported", key("attention.causal")));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
