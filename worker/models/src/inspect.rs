//! Inspection of a checkpoint before it is loaded: can this build serve it, and how much memory does it take?

#[cfg(feature = "hybrid-test-model")]
use crate::hybrid_test;
#[cfg(feature = "media-test-model")]
use crate::media_test;
use crate::{
    Footprint, LoadError, LoadOptions,
    architecture::{self, Architecture, Checkpoint},
    config::ConfigFile,
    deepseek_v4,
    families::{Family, Variant},
    llama, qwen3_5,
    weights::TensorSpec,
};

/// Refuses a config that this build cannot serve on groups of `ranks` ranks: an unknown family, quantised weights, keys
/// that are missing or unsupported, and sizes that the ranks cannot divide. Reads no weights.
pub fn check_config(options: &LoadOptions, ranks: usize) -> Result<(), LoadError> {
    inspect(options, Check { ranks })
}

/// Computes the memory that each rank of a group of `ranks` ranks takes. Checks the config and every tensor, but reads
/// only the headers of the weights.
pub fn footprints(options: &LoadOptions, ranks: usize) -> Result<Vec<Footprint>, LoadError> {
    inspect(options, Measure { ranks })
}

/// The matrices of a text model.
pub(crate) struct Projections {
    /// The matrices of the layers' linear maps that options of loading can quantise.
    pub matrices: Vec<TensorSpec>,
    /// Name of the embedding.
    pub embedding: String,
}

/// Returns the matrices of a checkpoint on a single rank, according to its config.
pub(crate) fn projections(options: &LoadOptions) -> Result<Projections, LoadError> {
    inspect(options, Matrices)
}

/// A question about a checkpoint whose config is parsed.
trait Question {
    type Answer;

    fn ask<A: Architecture>(self, config: A, of: Checkpoint<'_>) -> Result<Self::Answer, LoadError>;
}

struct Check {
    ranks: usize,
}

impl Question for Check {
    type Answer = ();

    fn ask<A: Architecture>(self, config: A, of: Checkpoint<'_>) -> Result<(), LoadError> {
        architecture::check(config, of, self.ranks)
    }
}

struct Measure {
    ranks: usize,
}

impl Question for Measure {
    type Answer = Vec<Footprint>;

    fn ask<A: Architecture>(self, config: A, of: Checkpoint<'_>) -> Result<Vec<Footprint>, LoadError> {
        architecture::footprints(config, of, self.ranks)
    }
}

struct Matrices;

impl Question for Matrices {
    type Answer = Projections;

    fn ask<A: Architecture>(self, config: A, of: Checkpoint<'_>) -> Result<Projections, LoadError> {
        architecture::projections(config, of)
    }
}

fn inspect<Q: Question>(options: &LoadOptions, question: Q) -> Result<Q::Answer, LoadError> {
    let file = &ConfigFile::read(&options.dir)?;
    let of = Checkpoint { file, options };
    match Family::of(file)?.variant {
        Variant::Llama(variant) => question.ask(llama::Config::parse(file, variant)?, of),
        Variant::Qwen35(variant) => question.ask(qwen3_5::Config::parse(file, variant)?, of),
        Variant::DeepseekV4 => question.ask(deepseek_v4::Config::parse(file)?, of),
        // The encoder of the test model is far smaller than its thinker, and is left out.
        #[cfg(feature = "media-test-model")]
        Variant::MediaTest => question.ask(media_test::parse(file)?.0, of),
        #[cfg(feature = "hybrid-test-model")]
        Variant::HybridTest => question.ask(hybrid_test::Config::parse(file)?, of),
    }
}
