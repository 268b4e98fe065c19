//! The names of a checkpoint's tensors in a GGUF file.

/// A tensor of a GGUF file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Location {
    pub name: String,
    /// The index of an expert in a stack.
    pub expert: Option<usize>,
    pub rows: Rows,
}

/// The order of a tensor's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rows {
    Plain,
    /// Heads of q, which some architectures turn.
    Queries,
    /// Heads of k, which some architectures turn.
    Keys,
}

/// Modules of a layer.
const MODULES: [(&str, &str); 12] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
];

/// Modules of an expert, which GGUF stacks.
const EXPERTS: [(&str, &str); 3] =
    [("gate_proj", "ffn_gate_exps"), ("up_proj", "ffn_up_exps"), ("down_proj", "ffn_down_exps")];

/// Returns where a GGUF file has the tensor of this name; `None` if it has no such tensor.
pub(super) fn locate(name: &str) -> Option<Location> {
    let plain = |name: &str| Some(Location { name: name.into(), expert: None, rows: Rows::Plain });
    match name {
        "model.embed_tokens.weight" => return plain("token_embd.weight"),
        "model.norm.weight" => return plain("output_norm.weight"),
        "lm_head.weight" => return plain("output.weight"),
        _ => {}
    }
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (module, kind) = rest.rsplit_once('.')?;
    if let Some(of_expert) = module.strip_prefix("mlp.experts.") {
        let (expert, module) = of_expert.split_once('.')?;
        let (_, stack) = EXPERTS.iter().find(|(ours, _)| *ours == module)?;
        let name = format!("blk.{layer}.{stack}.{kind}");
        return Some(Location { name, expert: Some(expert.parse().ok()?), rows: Rows::Plain });
    }
    let (ours, theirs) = MODULES.iter().find(|(ours, _)| *ours == module)?;
    let rows = match *ours {
        "self_attn.q_proj" => Rows::Queries,
        "self_attn.k_proj" => Rows::Keys,
        _ => Rows::Plain,
    };
    Some(Location { name: format!("blk.{layer}.{theirs}.{kind}"), expert: None, rows })
}
