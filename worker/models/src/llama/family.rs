//! The families of this architecture, and what distinguishes them.

/// One family: its names, and the variants of the architecture that it uses.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Family {
    /// Name in a config's `architectures`.
    pub architecture: &'static str,
    /// Name in a config's `model_type`, which is used only if `architectures` is missing.
    pub model_type: &'static str,
    /// Name in logs and errors.
    pub name: &'static str,
    /// True if each head of q and k has an RMS norm.
    pub head_norms: bool,
    /// Presence of biases in the attention.
    pub biases: Biases,
    /// Layers with a sliding window.
    pub windows: Windows,
    /// True if layers may have experts in place of an MLP.
    pub experts: bool,
    /// `head_dim` of a config without that key.
    pub head_dim: HeadDim,
    /// `max_position_embeddings` of a config without that key.
    pub max_position_embeddings: usize,
}

/// The biases of the attention's projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Biases {
    /// None, whatever the config says.
    Never,
    /// q, k and v always have biases, and o never has one.
    Qkv,
    /// q, k, v and o have biases if `attention_bias` is true.
    ByKey,
}

/// The rule by which layers get a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Windows {
    /// No layer has one.
    Never,
    /// All layers have `sliding_window`, unless it is null.
    All,
    /// All layers have `sliding_window` if `use_sliding_window` is true.
    AllIfUsed,
    /// The layers that `layer_types` names, or those from `max_window_layers` on, if `use_sliding_window` is true.
    ByLayer,
}

/// The default of `head_dim`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadDim {
    /// This number of elements.
    Fixed(usize),
    /// `hidden_size / num_attention_heads`.
    ShareOfHidden,
}

/// Llama 2 and 3, SmolLM, and all that is saved under their name. Reference: transformers
/// `models/llama/modeling_llama.py`. Paper: "The Llama 3 Herd of Models", arXiv:2407.21783.
const LLAMA: Family = Family {
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    name: "Llama",
    head_norms: false,
    biases: Biases::ByKey,
    windows: Windows::Never,
    experts: false,
    head_dim: HeadDim::ShareOfHidden,
    max_position_embeddings: 2048,
};

/// Mistral. Reference: transformers `models/mistral/modeling_mistral.py`. Paper: "Mistral 7B", arXiv:2310.06825.
const MISTRAL: Family = Family {
    architecture: "MistralForCausalLM",
    model_type: "mistral",
    name: "Mistral",
    biases: Biases::Never,
    windows: Windows::All,
    max_position_embeddings: 4096 * 32,
    ..LLAMA
};

/// Qwen2 and Qwen2.5. Reference: transformers `models/qwen2/modeling_qwen2.py`. Paper: "Qwen2.5 Technical Report",
/// arXiv:2412.15115.
const QWEN2: Family = Family {
    architecture: "Qwen2ForCausalLM",
    model_type: "qwen2",
    name: "Qwen2",
    biases: Biases::Qkv,
    windows: Windows::ByLayer,
    max_position_embeddings: 32_768,
    ..LLAMA
};

/// Dense Qwen3, and Qwen3-Embedding, whose checkpoints hold no LM head. Reference: transformers
/// `models/qwen3/modeling_qwen3.py`. Paper: "Qwen3 Technical Report", arXiv:2505.09388.
pub(crate) const QWEN3: Family = Family {
    architecture: "Qwen3ForCausalLM",
    model_type: "qwen3",
    name: "Qwen3",
    head_norms: true,
    biases: Biases::ByKey,
    windows: Windows::ByLayer,
    experts: false,
    head_dim: HeadDim::Fixed(128),
    max_position_embeddings: 32_768,
};

/// Qwen3 with experts. Reference: transformers `models/qwen3_moe/modeling_qwen3_moe.py`. Paper: arXiv:2505.09388.
const QWEN3_MOE: Family = Family {
    architecture: "Qwen3MoeForCausalLM",
    model_type: "qwen3_moe",
    name: "Qwen3-MoE",
    windows: Windows::AllIfUsed,
    experts: true,
    ..QWEN3
};

/// The families of this architecture.
pub(crate) const FAMILIES: [&Family; 5] = [&LLAMA, &MISTRAL, &QWEN2, &QWEN3, &QWEN3_MOE];
