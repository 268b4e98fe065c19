//! The families of this architecture, and their differences.

use crate::{
    config::{
        ranges::{TEXT_CONFIG, THINKER_CONFIG},
        text::TextDefaults,
    },
    encoders::{EncoderRules, VideoRule},
    experts::ExpertSizes,
    rope::RopeDefaults,
    vision,
};

/// A family's differences from other families of this architecture.
#[derive(Debug, PartialEq)]
pub(crate) struct Variant {
    /// Name in logs and errors.
    pub name: &'static str,
    /// True if each head of q and k has an RMS norm.
    pub head_norms: bool,
    /// Presence of biases in the attention's projections.
    pub biases: Biases,
    /// The layers that have a sliding window.
    pub windows: Windows,
    /// The rules of experts; `None` if no layer has experts in place of an MLP.
    pub experts: Option<ExpertRules>,
    /// Names of the text model's objects and tensors.
    pub names: CheckpointNames,
    /// True if a vision encoder may give features that are added behind the first layers (*deepstack*), and positions
    /// have three axes.
    pub pictures: bool,
    /// Rules of media; `None` if the family takes text alone.
    pub encoders: Option<&'static EncoderRules>,
    /// Defaults of keys that a config lacks.
    pub defaults: TextDefaults,
    /// Default of `rope_theta`.
    pub theta: f64,
}

/// Rules of a family's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpertRules {
    /// Defaults of `num_experts`, `num_experts_per_tok` and `moe_intermediate_size`.
    pub sizes: ExpertSizes,
    pub renormalise: Renormalise,
}

/// The rule by which the weights of a token's experts are normalised to the sum 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Renormalise {
    /// As `norm_topk_prob` says, or this default.
    ByKey(bool),
    /// Always. The config has no effect.
    Always,
}

/// Names of the objects in a config that hold a text model's keys, and of its tensors in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CheckpointNames {
    /// Path of the object whose keys win over those of the text model, such as `tie_word_embeddings`.
    pub top: &'static [&'static str],
    /// Path of the text model's object inside the object at `top`.
    pub text: &'static [&'static str],
    /// Prefix of the names of all tensors but the LM head.
    pub prefix: &'static str,
    /// Name of the LM head.
    pub lm_head: &'static str,
}

/// The names in a checkpoint of a text model.
const ALONE: CheckpointNames =
    CheckpointNames { top: &[], text: &[], prefix: "model.", lm_head: "lm_head.weight" };

/// The names in a checkpoint with a vision encoder.
const BESIDE_VISION: CheckpointNames =
    CheckpointNames { text: &[TEXT_CONFIG], prefix: "model.language_model.", ..ALONE };

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
    experts: None,
    names: ALONE,
    pictures: false,
    encoders: None,
    defaults: TextDefaults { kv_heads: None, head_dim: None, max_position_embeddings: 2048 },
    theta: RopeDefaults::PLAIN.theta,
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
    defaults: TextDefaults { kv_heads: None, head_dim: Some(128), max_position_embeddings: 32_768 },
    ..LLAMA
};

/// Qwen3 with experts. Reference: transformers `models/qwen3_moe/modeling_qwen3_moe.py`. Paper: arXiv:2505.09388.
pub(crate) const QWEN3_MOE: Variant = Variant {
    name: "Qwen3-MoE",
    windows: Windows::AllIfUsed,
    experts: Some(ExpertRules {
        sizes: ExpertSizes { experts: 128, top_k: 8, intermediate_size: 768 },
        renormalise: Renormalise::ByKey(false),
    }),
    ..QWEN3
};

/// Dense Qwen3-VL. Reference: transformers `models/qwen3_vl/modeling_qwen3_vl.py`. Paper: "Qwen3-VL Technical Report",
/// arXiv:2511.21631.
pub(crate) const QWEN3_VL: Variant = Variant {
    name: "Qwen3-VL",
    windows: Windows::Never,
    names: BESIDE_VISION,
    pictures: true,
    encoders: Some(&EncoderRules { vision: &vision::VL, videos: VideoRule::Stamped, features: true }),
    defaults: TextDefaults { kv_heads: Some(32), head_dim: Some(128), max_position_embeddings: 128_000 },
    theta: 500_000.0,
    ..QWEN3
};

/// Qwen3-VL with experts. Reference: transformers `models/qwen3_vl_moe/modeling_qwen3_vl_moe.py`.
pub(crate) const QWEN3_VL_MOE: Variant = Variant {
    name: "Qwen3-VL-MoE",
    experts: Some(ExpertRules {
        sizes: ExpertSizes { experts: 60, top_k: 4, intermediate_size: 1408 },
        renormalise: Renormalise::Always,
    }),
    defaults: TextDefaults { kv_heads: Some(16), head_dim: None, max_position_embeddings: 128_000 },
    ..QWEN3_VL
};

/// The thinker of Qwen3-Omni, which takes sound, pictures and frames, and answers with text. Reference: transformers
/// `models/qwen3_omni_moe/modeling_qwen3_omni_moe.py`. Paper: "Qwen3-Omni Technical Report", arXiv:2509.17765.
pub(crate) const QWEN3_OMNI: Variant = Variant {
    name: "Qwen3-Omni thinker",
    experts: Some(ExpertRules {
        sizes: ExpertSizes { experts: 128, top_k: 8, intermediate_size: 768 },
        renormalise: Renormalise::ByKey(true),
    }),
    names: CheckpointNames {
        top: &[THINKER_CONFIG],
        text: &[TEXT_CONFIG],
        prefix: "thinker.model.",
        lm_head: "thinker.lm_head.weight",
    },
    encoders: Some(&EncoderRules { vision: &vision::OMNI, videos: VideoRule::Timed, features: true }),
    defaults: TextDefaults { kv_heads: Some(4), head_dim: None, max_position_embeddings: 32_768 },
    theta: 1_000_000.0,
    ..QWEN3_VL
};
