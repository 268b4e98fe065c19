//! The common steps of checking and loading a text model, and [`Architecture`], which supplies the steps that differ.

use std::path::Path;

use tutti_kernels::{Compressed, DeltaRule, Experts, HyperConnections, collective::GroupRank};

use crate::{
    DecoderDevice, LoadError, LoadOptions,
    config::ConfigFile,
    decoder::{Decoder, EndSpecs, Layers, TextShape},
    experts::{Division, ExpertLayout, ExpertShape, NO_EXPERTS},
    footprint::Footprint,
    inspect::Projections,
    thinker::HeldNodes,
    weights::{Loader, Precision, Progress, Role, Source, TensorSpec},
};

/// The checked config of a text model. It determines the model's weights and the loop over its layers. An
/// implementation of the trait is one architecture, which several families may share.
pub(crate) trait Architecture: Sized {
    /// The tensors of one layer.
    type LayerSpecs;
    /// The layers with their weights and buffers on a device.
    type Layers<D: DecoderDevice>: Layers<D>;

    /// Operations that the layers need in addition to those of a dense text model.
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// The shape of the experts; `None` if no layer has experts.
    fn experts(&mut self) -> Option<&mut ExpertShape> {
        None
    }

    /// Returns the name in the checkpoint of an MLP with experts; `None` if no layer has experts.
    fn module_with_experts(&self) -> Option<String> {
        None
    }

    /// Returns the config of one rank's shard. Refuses a number of ranks among which the model cannot be divided.
    fn shard(&self, group_rank: GroupRank) -> Result<Self, String>;

    /// Returns the shape of the decoder around the layers. The checkpoint is in `dir`.
    fn text(&self, dir: &Path, max_step_tokens: usize) -> Result<TextShape, LoadError>;

    /// Number of layers.
    fn layers(&self) -> usize;

    /// Returns the tensors of a layer that a rank loads. `layout` is the layout of the experts, if the layer has
    /// experts.
    fn layer_specs(&self, layer: usize, layout: ExpertLayout, group_rank: GroupRank) -> Self::LayerSpecs;

    /// Returns all tensors of a layer, in the order of loading.
    fn tensors(specs: &Self::LayerSpecs) -> Vec<&TensorSpec>;

    /// Loads the layers, and allocates their buffers for `tokens` tokens per step. `self` is a rank's shard.
    fn load<D: DecoderDevice>(
        &self,
        specs: &[Self::LayerSpecs],
        tokens: usize,
        loader: &mut Loader<'_, D>,
    ) -> Result<Self::Layers<D>, LoadError>;

    /// Makes the ranks hold whole experts instead of a share of each expert's width. Refuses a model without experts.
    fn divide_whole_experts(&mut self) -> Result<(), String> {
        self.experts().ok_or(NO_EXPERTS)?.division = Division::Experts;
        Ok(())
    }
}

/// A checkpoint's `config.json` and the options of its loading.
#[derive(Clone, Copy)]
pub(crate) struct Checkpoint<'a> {
    pub file: &'a ConfigFile,
    pub options: &'a LoadOptions,
}

/// Loads the checkpoint whose config is `config`. Errors contain `architecture`, which is the name of the architecture.
pub(crate) fn load<A: Architecture, D: DecoderDevice>(
    mut config: A,
    architecture: &'static str,
    checkpoint: Checkpoint<'_>,
    device: D,
    progress: Progress<'_>,
) -> Result<Decoder<D, A::Layers<D>>, LoadError> {
    config.needs().check(checkpoint.file, architecture, &device)?;
    divide(&mut config, checkpoint)?;
    let RankParts { shard, text, specs } = RankParts::new(&config, checkpoint, device.group_rank())?;
    let Checkpoint { options, .. } = checkpoint;
    let (dir, tokens) = (&options.dir, options.max_step_tokens);
    let all = specs.iter().flat_map(A::tensors);
    Decoder::load(text, all, (dir, options), device, progress, |loader| shard.load(&specs, tokens, loader))
}

/// Makes the ranks of `config` hold whole experts, if the options say so.
fn divide<A: Architecture>(
    config: &mut A,
    Checkpoint { file, options }: Checkpoint<'_>,
) -> Result<(), LoadError> {
    if options.expert_parallel {
        config.divide_whole_experts().map_err(|problem| file.invalid(problem))?;
    }
    Ok(())
}

/// Refuses a config that cannot be divided among `ranks` ranks. Reads no weights.
pub(crate) fn check<A: Architecture>(
    mut config: A,
    checkpoint: Checkpoint<'_>,
    ranks: usize,
) -> Result<(), LoadError> {
    let Checkpoint { file, options } = checkpoint;
    divide(&mut config, checkpoint)?;
    for rank in 0..ranks {
        config.shard(GroupRank { rank, world_size: ranks }).map_err(|problem| file.invalid(problem))?;
    }
    config.text(&options.dir, options.max_step_tokens).map(drop)
}

/// Computes the memory that each of `ranks` ranks takes. Reads the headers of the weights, and checks the presence, the
/// type and the shape of each tensor.
pub(crate) fn footprints<A: Architecture>(
    mut config: A,
    checkpoint: Checkpoint<'_>,
    ranks: usize,
) -> Result<Vec<Footprint>, LoadError> {
    divide(&mut config, checkpoint)?;
    let options = checkpoint.options;
    if !HeldNodes::of(options.nodes.as_deref()).thinker() {
        return Ok(vec![Footprint::default(); ranks]);
    }
    let dtype = config.text(&options.dir, options.max_step_tokens)?.dtype;
    let source = Source::open(&options.dir, options, dtype)?;
    let of_rank = |rank| {
        let group_rank = GroupRank { rank, world_size: ranks };
        let RankParts { text, specs, .. } = RankParts::new(&config, checkpoint, group_rank)?;
        Footprint::of(&text, specs.iter().flat_map(A::tensors), &source, options, group_rank)
    };
    (0..ranks).map(of_rank).collect()
}

/// Returns the matrices of the layers' linear maps that options of loading can quantise, on a single rank.
pub(crate) fn projections<A: Architecture>(
    config: A,
    checkpoint: Checkpoint<'_>,
) -> Result<Projections, LoadError> {
    let alone = GroupRank { rank: 0, world_size: 1 };
    let RankParts { text, specs, .. } = RankParts::new(&config, checkpoint, alone)?;
    let source = Source::open(&checkpoint.options.dir, checkpoint.options, text.dtype)?;
    let embedding = EndSpecs::fewest(&text, &source).embedding.name;
    // Weights of convolutions have more dimensions.
    let is_linear = |spec: &&TensorSpec| {
        spec.role == Role::Projection
            && spec.precision == Precision::Configured
            && spec.dims.columns > 1
            && spec.shape.len() == if spec.dims.matrices == 1 { 2 } else { 3 }
    };
    let matrices = specs.iter().flat_map(A::tensors).filter(is_linear).cloned().collect();
    Ok(Projections { matrices, embedding })
}

/// The parts of a model that one rank loads, known from the config.
struct RankParts<A: Architecture> {
    /// The config of the rank's shard.
    shard: A,
    text: TextShape,
    /// The tensors of each layer.
    specs: Vec<A::LayerSpecs>,
}

impl<A: Architecture> RankParts<A> {
    fn new(
        config: &A,
        Checkpoint { file, options }: Checkpoint<'_>,
        rank: GroupRank,
    ) -> Result<Self, LoadError> {
        let shard = config.shard(rank).map_err(|problem| file.invalid(problem))?;
        let layout = match config.module_with_experts() {
            Some(module) => ExpertLayout::of(&options.dir, options, &module)?,
            None => ExpertLayout::Each,
        };
        let text = config.text(&options.dir, options.max_step_tokens)?;
        let specs = (0..config.layers()).map(|layer| config.layer_specs(layer, layout, rank)).collect();
        Ok(Self { shard, text, specs })
    }
}

/// Families of operations that an architecture's layers need in addition to those of a dense text model.
#[derive(Clone, Copy, Default)]
pub(crate) struct Needs {
    pub experts: bool,
    pub delta_rule: bool,
    pub hyper_connections: bool,
    pub compressed: bool,
}

impl Needs {
    /// Returns an error if the device does not implement all of these families. The error names the config `file` and
    /// the architecture.
    pub fn check<D: DecoderDevice>(
        self,
        file: &ConfigFile,
        architecture: &'static str,
        device: &D,
    ) -> Result<(), LoadError> {
        let implemented = Self {
            experts: <D as Experts>::IMPLEMENTED,
            delta_rule: <D as DeltaRule>::IMPLEMENTED,
            hyper_connections: <D as HyperConnections>::IMPLEMENTED,
            compressed: <D as Compressed>::IMPLEMENTED,
        };
        let lacking = self.beyond(implemented);
        match &lacking[..] {
            [] => Ok(()),
            lacking => Err(LoadError::Operations {
                path: file.path().to_owned(),
                architecture,
                operations: lacking.join(" and "),
                device: device.describe(),
            }),
        }
    }

    /// Returns the names of the families of operations that `self` needs and `implemented` lacks.
    fn beyond(self, implemented: Self) -> Vec<&'static str> {
        let families = [
            ("Experts", self.experts, implemented.experts),
            ("DeltaRule", self.delta_rule, implemented.delta_rule),
            ("HyperConnections", self.hyper_connections, implemented.hyper_connections),
            ("Compressed", self.compressed, implemented.compressed),
        ];
        let lacking = families.into_iter().filter(|(_, needed, implemented)| *needed && !implemented);
        lacking.map(|(name, ..)| name).collect()
    }
}

#[cfg(test)]
mod tests;
