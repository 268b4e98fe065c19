//! Loads a checkpoint directory as a model on a device.

use std::path::PathBuf;

use tutti_kernels::{Collectives, DeltaRule, Dense, Experts, PagedAttention, Quantize, Recurrence, Sampler};
pub use tutti_settings::LoadFormat;

#[cfg(any(feature = "media-test-model", feature = "hybrid-test-model"))]
use crate::experts::NO_EXPERTS;
#[cfg(feature = "hybrid-test-model")]
use crate::hybrid_test;
#[cfg(feature = "media-test-model")]
use crate::media_test;
use crate::{LoadError, LoadProgress, Model, config::ConfigFile, llama, qwen3_5};

/// The checkpoint to load, and the sizes of steps and pages that the model is loaded for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// The checkpoint's directory.
    pub dir: PathBuf,
    /// Source of the weights.
    pub load_format: LoadFormat,
    /// Quantisation of the thinker's matrices: embedding, projections and LM head. Norms, biases and encoders keep
    /// their stored type.
    pub quantize: Quantize,
    /// Maximum number of tokens per step, padding included. It sets the size of the activation buffers.
    pub max_step_tokens: usize,
    /// Tokens per KV page.
    pub page_tokens: usize,
    /// True if the ranks of a group divide whole experts among themselves, false if they divide each expert.
    pub expert_parallel: bool,
    /// Names of the nodes to load; `None` loads all. Names that the model's declaration lacks are not checked here: the
    /// conductor refuses them.
    pub nodes: Option<Vec<String>>,
    /// Seed of dummy weights.
    pub seed: u64,
}

/// The architectures that this build loads, beside those of [`llama::FAMILIES`] and [`qwen3_5::FAMILIES`].
const OTHERS: &[&str] = &[
    #[cfg(feature = "media-test-model")]
    media_test::ARCHITECTURE,
    #[cfg(feature = "hybrid-test-model")]
    hybrid_test::ARCHITECTURE,
];

/// A device with all operations that the families of this build use.
pub trait DecoderDevice:
    Dense + Experts + PagedAttention + DeltaRule + Recurrence + Collectives + Sampler
{
}

impl<D: Dense + Experts + PagedAttention + DeltaRule + Recurrence + Collectives + Sampler> DecoderDevice
    for D
{
}

/// Families of operations that an architecture's layers need beside those of a dense text model.
#[derive(Clone, Copy, Default)]
pub(crate) struct Needs {
    pub experts: bool,
    pub delta_rule: bool,
}

impl Needs {
    /// Refuses the model of `file` on a device that lacks a family.
    pub fn check<D: DecoderDevice>(
        self,
        file: &ConfigFile,
        architecture: &'static str,
        device: &D,
    ) -> Result<(), LoadError> {
        let implemented =
            Self { experts: <D as Experts>::IMPLEMENTED, delta_rule: <D as DeltaRule>::IMPLEMENTED };
        let lacking = self.beyond(implemented);
        match &lacking[..] {
            [] => Ok(()),
            lacking => Err(LoadError::Operations {
                path: file.path.clone(),
                architecture,
                operations: lacking.join(" and "),
                device: device.describe(),
            }),
        }
    }

    /// Names of the families that are needed and not implemented.
    fn beyond(self, implemented: Self) -> Vec<&'static str> {
        let families = [
            ("Experts", self.experts, implemented.experts),
            ("DeltaRule", self.delta_rule, implemented.delta_rule),
        ];
        let lacking = families.into_iter().filter(|(_, needed, implemented)| *needed && !implemented);
        lacking.map(|(name, ..)| name).collect()
    }
}

/// Loads the checkpoint of `options` onto `device`, and calls `progress` as tensors are loaded.
///
/// The presence, type and shape of every tensor are checked before the first tensor is read. An error names the file,
/// and the key or tensor at fault.
pub fn load<D: DecoderDevice>(
    options: &LoadOptions,
    device: D,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<Box<dyn Model>, LoadError> {
    let dir = &options.dir;
    let file = ConfigFile::read(dir)?;
    let named = |architecture, model_type| {
        // Several architectures share one `model_type`, so `model_type` decides only where `architectures` is missing.
        file.architectures.iter().any(|name| name == architecture)
            || file.architectures.is_empty() && file.model_type.as_deref() == Some(model_type)
    };
    if let Some(family) =
        llama::FAMILIES.into_iter().find(|family| named(family.architecture, family.model_type))
    {
        return Ok(Box::new(llama::load(family, &file, dir, options, device, progress)?));
    }
    if let Some(family) =
        qwen3_5::FAMILIES.into_iter().find(|family| named(family.architecture, family.model_type))
    {
        return Ok(Box::new(qwen3_5::load(family, &file, dir, options, device, progress)?));
    }
    #[cfg(any(feature = "media-test-model", feature = "hybrid-test-model"))]
    if options.expert_parallel {
        return Err(file.invalid(NO_EXPERTS));
    }
    #[cfg(feature = "media-test-model")]
    if named(media_test::ARCHITECTURE, media_test::MODEL_TYPE) {
        return media_test::load(&file, dir, options, device, progress);
    }
    #[cfg(feature = "hybrid-test-model")]
    if named(hybrid_test::ARCHITECTURE, hybrid_test::MODEL_TYPE) {
        return Ok(Box::new(hybrid_test::load(&file, dir, options, device, progress)?));
    }
    Err(LoadError::Architecture {
        path: file.path,
        architectures: file.architectures,
        model_type: file.model_type,
        supported: supported().join(", "),
    })
}

/// The architectures that this build loads.
fn supported() -> Vec<&'static str> {
    let llama = llama::FAMILIES.iter().map(|family| family.architecture);
    let qwen3_5 = qwen3_5::FAMILIES.iter().map(|family| family.architecture);
    llama.chain(qwen3_5).chain(OTHERS.iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::Needs;

    #[test]
    fn a_device_lacks_the_families_that_are_needed_and_not_implemented() {
        let needs = |experts, delta_rule| Needs { experts, delta_rule };
        for (needed, implemented, lacking) in [
            (needs(false, false), needs(false, false), &[][..]),
            (needs(true, true), needs(true, true), &[]),
            (needs(true, false), needs(false, true), &["Experts"]),
            (needs(true, true), needs(true, false), &["DeltaRule"]),
            (needs(true, true), needs(false, false), &["Experts", "DeltaRule"]),
        ] {
            assert_eq!(needed.beyond(implemented), lacking);
        }
    }
}
