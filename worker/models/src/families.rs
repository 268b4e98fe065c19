//! The families that this build loads, and the code of each.
//!
//! [`FAMILIES`] is the only table of families in the code. docs/adding-a-model.md has a copy, and a test compares the
//! two.

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod sample;

use tutti_runtime::nearest::nearest;

use crate::{
    LoadError,
    config::{ConfigFile, Names},
    llama, qwen3_5,
};

/// A model family that this build loads.
#[derive(Debug)]
pub(crate) struct Family {
    /// Name in a config's `architectures`.
    pub architecture: &'static str,
    /// Name in a config's `model_type`, which is used only if `architectures` is missing.
    pub model_type: &'static str,
    /// Published models of the family.
    #[cfg_attr(not(test), expect(dead_code, reason = "for readers, and for the test of the docs"))]
    pub models: &'static str,
    /// The file in this folder that documents the family's differences from others.
    #[cfg_attr(not(test), expect(dead_code, reason = "for readers, and for the test of the docs"))]
    pub source: &'static str,
    pub variant: Variant,
}

/// The architecture of a family, with the family's differences from others of that architecture.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Variant {
    Llama(&'static llama::Variant),
    Qwen35(&'static qwen3_5::Variant),
    DeepseekV4,
    #[cfg(feature = "media-test-model")]
    MediaTest,
    #[cfg(feature = "hybrid-test-model")]
    HybridTest,
}

/// All families of this build.
pub(crate) const FAMILIES: &[Family] = &[
    Family {
        architecture: "LlamaForCausalLM",
        model_type: "llama",
        models: "Llama 2 and 3, SmolLM",
        source: "llama/variant.rs",
        variant: Variant::Llama(&llama::LLAMA),
    },
    Family {
        architecture: "MistralForCausalLM",
        model_type: "mistral",
        models: "Mistral 7B",
        source: "llama/variant.rs",
        variant: Variant::Llama(&llama::MISTRAL),
    },
    Family {
        architecture: "Qwen2ForCausalLM",
        model_type: "qwen2",
        models: "Qwen2, Qwen2.5",
        source: "llama/variant.rs",
        variant: Variant::Llama(&llama::QWEN2),
    },
    Family {
        architecture: "Qwen3ForCausalLM",
        model_type: "qwen3",
        models: "Qwen3, Qwen3-Embedding",
        source: "llama/variant.rs",
        variant: Variant::Llama(&llama::QWEN3),
    },
    Family {
        architecture: "Qwen3MoeForCausalLM",
        model_type: "qwen3_moe",
        models: "Qwen3-MoE",
        source: "llama/variant.rs",
        variant: Variant::Llama(&llama::QWEN3_MOE),
    },
    Family {
        architecture: "Qwen3_5ForConditionalGeneration",
        model_type: "qwen3_5",
        models: "Qwen3.5 dense",
        source: "qwen3_5.rs",
        variant: Variant::Qwen35(&qwen3_5::DENSE),
    },
    Family {
        architecture: "Qwen3_5ForCausalLM",
        model_type: "qwen3_5_text",
        models: "Qwen3.5 dense",
        source: "qwen3_5.rs",
        variant: Variant::Qwen35(&qwen3_5::DENSE),
    },
    Family {
        architecture: "Qwen3_5MoeForConditionalGeneration",
        model_type: "qwen3_5_moe",
        models: "Qwen3.5-MoE",
        source: "qwen3_5.rs",
        variant: Variant::Qwen35(&qwen3_5::MOE),
    },
    Family {
        architecture: "Qwen3_5MoeForCausalLM",
        model_type: "qwen3_5_moe_text",
        models: "Qwen3.5-MoE",
        source: "qwen3_5.rs",
        variant: Variant::Qwen35(&qwen3_5::MOE),
    },
    Family {
        architecture: "Qwen3VLForConditionalGeneration",
        model_type: "qwen3_vl",
        models: "Qwen3-VL dense",
        source: "llama/variant.rs",
        variant: Variant::Llama(&llama::QWEN3_VL),
    },
    Family {
        architecture: "Qwen3VLMoeForConditionalGeneration",
        model_type: "qwen3_vl_moe",
        models: "Qwen3-VL-MoE",
        source: "llama/variant.rs",
        variant: Variant::Llama(&llama::QWEN3_VL_MOE),
    },
    Family {
        architecture: "Qwen3OmniMoeForConditionalGeneration",
        model_type: "qwen3_omni_moe",
        models: "Qwen3-Omni",
        source: "llama/variant.rs",
        variant: Variant::Llama(&llama::QWEN3_OMNI),
    },
    Family {
        architecture: "DeepseekV4ForCausalLM",
        model_type: "deepseek_v4",
        models: "DeepSeek-V4",
        source: "deepseek_v4.rs",
        variant: Variant::DeepseekV4,
    },
    #[cfg(feature = "media-test-model")]
    Family {
        architecture: "TuttiMediaTestForCausalLM",
        model_type: "tutti_media_test",
        models: "a test model with an audio encoder",
        source: "media_test.rs",
        variant: Variant::MediaTest,
    },
    #[cfg(feature = "hybrid-test-model")]
    Family {
        architecture: "TuttiHybridTestForCausalLM",
        model_type: "tutti_hybrid_test",
        models: "a test model with state in slots",
        source: "hybrid_test.rs",
        variant: Variant::HybridTest,
    },
];

impl Family {
    /// Returns the family of a checkpoint.
    pub fn of(file: &ConfigFile) -> Result<&'static Self, LoadError> {
        let Names { architectures, model_type } = file.names()?;
        // Several architectures share one `model_type`, so `model_type` decides only where `architectures` is missing.
        let named = |family: &&Self| {
            architectures.iter().any(|name| name == family.architecture)
                || architectures.is_empty() && model_type.as_deref() == Some(family.model_type)
        };
        FAMILIES.iter().find(named).ok_or_else(|| LoadError::Architecture {
            path: file.path().to_owned(),
            supported: supported(&architectures, model_type.as_deref()),
            architectures: architectures.clone(),
            model_type: model_type.clone(),
        })
    }
}

/// Says which architectures this build has: the nearest to the names of a config, or all if none is near.
fn supported(architectures: &[String], model_type: Option<&str>) -> String {
    let all = || FAMILIES.iter().map(|family| family.architecture);
    let near: Vec<&str> = match (architectures.first(), model_type) {
        (Some(name), _) => nearest(name, all(), stem),
        (None, Some(name)) => {
            let types = nearest(name, FAMILIES.iter().map(|family| family.model_type), |name| name);
            let named = |name: &&str| FAMILIES.iter().find(|family| family.model_type == *name);
            types.iter().filter_map(named).map(|family| family.architecture).collect()
        }
        (None, None) => Vec::new(),
    };
    match &near[..] {
        [] => format!("supported: {}", all().collect::<Vec<_>>().join(", ")),
        near => format!("the nearest that are supported: {}", near.join(", ")),
    }
}

/// The part of an architecture's name that names the family.
fn stem(architecture: &str) -> &str {
    architecture.split_once("For").map_or(architecture, |(family, _)| family)
}

#[cfg(test)]
mod tests;
