//! The families of this architecture, and their differences.

use crate::config::text::TextDefaults;

/// A family's differences from other families of this architecture.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Variant {
    /// Name in logs and errors.
    pub name: &'static str,
    /// True if each head of q and k has an RMS norm.
    pub head_norms: bool,
    /// Presence of biases in the attention's projections.
    pub biases: Biases,
    /// The layers that have a sliding window.
    pub windows: Windows,
    /// True if layers may have experts in place of an MLP.
    pub experts: bool,
    /// Defaults of keys that a config lacks.
    pub defaults: TextDefaults,
}

/// The rule by which the attention's projections have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Biases {
    /// No biases. The config has no effect.
    Never,
    /// q, k and v always have biases, and o never has one.
    Qkv,
    /// q, k, v and o have biases if `attention_bias` is true.
    ByKey,
}

/// The rule by which layers get a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Windows {
    /// No layer has a window.
    Never,
    /// All layers have the window `sliding_window`. If that key is null, no layer has a window.
    All,
    /// All layers have the window `sliding_window` if `use_sliding_window` is true.
    AllIfUsed,
    /// If `use_sliding_window` is true, the layers in `layer_types` have a window or, without that key, the layers from
    /// `max_window_layers` on.
    ByLayer,
}

/// Llama 2 and 3, SmolLM, and other models that are saved as Llama. Reference: transformers
/// `models/llama/modeling_llama.py`. Paper: "The Llama 3 Herd of Models", arXiv:2407.21783.
pub(crate) const LLAMA: Variant = Variant {
    name: "Llama",
    head_norms: false,
    biases: Biases::ByKey,
    windows: Windows::Never,
    experts: false,
    defaults: TextDefaults { kv_heads: None, head_dim: None, max_position_embeddings: 2048 },
};

/// Mistral. Reference: transformers `models/mistral/modeling_mistral.py`. Paper: "Mistral 7B", arXiv:2310.06825.
pub(crate) const MISTRAL: Variant = Variant {
    name: "Mistral",
    biases: Biases::Never,
    windows: Windows::All,
    defaults: TextDefaults { max_position_embeddings: 4096 * 32, ..LLAMA.defaults },
    ..LLAMA
};

/// Qwen2 and Qwen2.5. Reference: transformers `models/qwen2/modeling_qwen2.py`. Paper: "Qwen2.5 Technical Report",
/// arXiv:2412.15115.
pub(crate) const QWEN2: Variant = Variant {
    name: "Qwen2",
    biases: Biases::Qkv,
    windows: Windows::ByLayer,
    defaults: TextDefaults { max_position_embeddings: 32_768, ..LLAMA.defaults },
    ..LLAMA
};

/// Dense Qwen3, and Qwen3-Embedding, whose checkpoints hold no LM head. Reference: transformers
/// `models/qwen3/modeling_qwen3.py`. Paper: "Qwen3 Technical Report", arXiv:2505.09388.
pub(crate) const QWEN3: Variant = Variant {
    name: "Qwen3",
    head_norms: true,
    biases: Biases::ByKey,
    windows: Windows::ByLayer,
    experts: false,
    defaults: TextDefaults { kv_heads: None, head_dim: Some(128), max_position_embeddings: 32_768 },
};

/// Qwen3 with experts. Reference: transformers `models/qwen3_moe/modeling_qwen3_moe.py`. Paper: arXiv:2505.09388.
pub(crate) const QWEN3_MOE: Variant =
    Variant { name: "Qwen3-MoE", windows: Windows::AllIfUsed, experts: true, ..QWEN3 };
