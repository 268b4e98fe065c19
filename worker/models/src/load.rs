//! Loads a checkpoint directory as a model on a device.

use std::path::PathBuf;

use tutti_kernels::{
    Collectives, Compressed, DeltaRule, Dense, Encoder, Experts, HyperConnections, PagedAttention, Quantize,
    Recurrence, Sampler,
};
pub use tutti_settings::{KvCacheDtype, LoadFormat};

#[cfg(feature = "hybrid-test-model")]
use crate::hybrid_test;
#[cfg(feature = "media-test-model")]
use crate::media_test;
use crate::{
    LoadError, LoadProgress, Model,
    architecture::{self, Checkpoint},
    config::ConfigFile,
    deepseek_v4,
    encoders::Encoders,
    families::{Family, Variant},
    llama, qwen3_5, with_encoders,
};

/// The checkpoint to load, and the sizes of steps and pages that the model is loaded for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// The checkpoint's directory.
    pub dir: PathBuf,
    /// Source of the weights.
    pub load_format: LoadFormat,
    /// Quantisation of the matrices of the thinker (the text model): embedding, projections and LM head. Norms, biases
    /// and encoders keep their stored type.
    pub quantize: Quantize,
    /// Storage type of keys and values.
    pub kv_cache_dtype: KvCacheDtype,
    /// Maximum number of tokens per step, padding included. It sets the size of the activation buffers.
    pub max_step_tokens: usize,
    /// Tokens per KV page.
    pub page_tokens: usize,
    /// True if the ranks of a group divide whole experts among themselves. False if they divide the width of each
    /// expert.
    pub expert_parallel: bool,
    /// Names of the nodes to load; `None` loads all. Names that the model lacks are ignored here, because the conductor
    /// refuses them.
    pub nodes: Option<Vec<String>>,
    /// Seed of dummy weights.
    pub seed: u64,
}

/// A device with all operations that the families of this build use.
pub trait DecoderDevice:
    Dense
    + Experts
    + PagedAttention
    + DeltaRule
    + HyperConnections
    + Compressed
    + Recurrence
    + Encoder
    + Collectives
    + Sampler
{
}

impl<
    D: Dense
        + Experts
        + PagedAttention
        + DeltaRule
        + HyperConnections
        + Compressed
        + Recurrence
        + Encoder
        + Collectives
        + Sampler,
> DecoderDevice for D
{
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
    let file = &ConfigFile::read(&options.dir)?;
    let Family { architecture, variant, .. } = *Family::of(file)?;
    let checkpoint = Checkpoint { file, options };
    Ok(match variant {
        Variant::Llama(variant) => {
            let config = llama::Config::parse(file, variant)?;
            let encoders = match variant.encoders {
                Some(rules) => {
                    let keys = config.encoder_keys(file)?;
                    Encoders::read(checkpoint, &keys, &config.text, rules, &device)?
                }
                None => None,
            };
            match encoders {
                Some(encoders) => {
                    with_encoders::load((config, &encoders), architecture, checkpoint, device, progress)?
                }
                None => Box::new(architecture::load(config, architecture, checkpoint, device, progress)?),
            }
        }
        Variant::Qwen35(variant) => {
            let config = qwen3_5::Config::parse(file, variant)?;
            match Encoders::read(checkpoint, &file.keys(), &config.text, &qwen3_5::ENCODERS, &device)? {
                Some(encoders) => {
                    with_encoders::load((config, &encoders), architecture, checkpoint, device, progress)?
                }
                None => Box::new(architecture::load(config, architecture, checkpoint, device, progress)?),
            }
        }
        Variant::DeepseekV4 => {
            let config = deepseek_v4::Config::parse(file)?;
            Box::new(architecture::load(config, architecture, checkpoint, device, progress)?)
        }
        #[cfg(feature = "media-test-model")]
        Variant::MediaTest => {
            let (config, audio) = media_test::parse(file)?;
            let encoder = media_test::TestEncoder { audio, thinker: config.text.clone() };
            with_encoders::load((config, &encoder), architecture, checkpoint, device, progress)?
        }
        #[cfg(feature = "hybrid-test-model")]
        Variant::HybridTest => {
            let config = hybrid_test::Config::parse(file)?;
            Box::new(architecture::load(config, architecture, checkpoint, device, progress)?)
        }
    })
}
