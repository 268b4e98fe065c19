//! The tensors of a vision encoder in the checkpoint and on a device.

use tutti_kernels::{Device, Quantize};

use super::config::{CHANNELS, VisionConfig};
use crate::{
    LoadError,
    encoder_weights::{LinearWeights, NormWeights, Pair},
    weights::{Loader, Role, Source, TensorSpec},
};

/// Names of a family's tensors that differ between families.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct VisionNames {
    /// Prefix of all names.
    prefix: &'static str,
    /// Name of the list of mergers of features.
    features: &'static str,
    /// Names in a merger of its norm and its two maps.
    merger: [&'static str; 3],
}

/// The names in checkpoints of Qwen3-Omni.
pub(crate) const OMNI: VisionNames =
    VisionNames { prefix: "thinker.visual.", features: "merger_list", merger: ["ln_q", "mlp.0", "mlp.2"] };
/// The names in checkpoints of Qwen3-VL and Qwen3.5.
pub(crate) const VL: VisionNames = VisionNames {
    prefix: "model.visual.",
    features: "deepstack_merger_list",
    merger: ["norm", "linear_fc1", "linear_fc2"],
};

/// The tensors of one layer.
struct LayerSpecs {
    attention_norm: Pair,
    qkv: Pair,
    out: Pair,
    mlp_norm: Pair,
    up: Pair,
    down: Pair,
}

impl LayerSpecs {
    fn tensors(&self) -> [[&TensorSpec; 2]; 6] {
        let Self { attention_norm, qkv, out, mlp_norm, up, down } = self;
        [attention_norm, qkv, out, mlp_norm, up, down].map(Pair::tensors)
    }
}

/// The tensors of one merger.
struct MergerSpecs {
    norm: Pair,
    first: Pair,
    second: Pair,
}

impl MergerSpecs {
    fn tensors(&self) -> [[&TensorSpec; 2]; 3] {
        [&self.norm, &self.first, &self.second].map(Pair::tensors)
    }
}

/// The tensors of an encoder.
struct Specs {
    patch: Pair,
    positions: TensorSpec,
    layers: Vec<LayerSpecs>,
    merger: MergerSpecs,
    features: Vec<MergerSpecs>,
}

impl Specs {
    fn new(config: &VisionConfig, names: &VisionNames) -> Self {
        let VisionConfig { hidden, intermediate, patch, temporal, merge, out, side, .. } = *config;
        let prefix = names.prefix;
        let joined = hidden * merge * merge;
        let merger = |module: String, norm_width| {
            let [norm, first, second] = names.merger.map(|part| format!("{prefix}{module}.{part}"));
            MergerSpecs {
                norm: Pair::norm(&norm, norm_width),
                first: Pair::linear(&first, joined, joined),
                second: Pair::linear(&second, out, joined),
            }
        };
        let layer = |index: usize| {
            let name = |module: &str| format!("{prefix}blocks.{index}.{module}");
            LayerSpecs {
                attention_norm: Pair::norm(&name("norm1"), hidden),
                qkv: Pair::linear(&name("attn.qkv"), 3 * hidden, hidden),
                out: Pair::linear(&name("attn.proj"), hidden, hidden),
                mlp_norm: Pair::norm(&name("norm2"), hidden),
                up: Pair::linear(&name("mlp.linear_fc1"), intermediate, hidden),
                down: Pair::linear(&name("mlp.linear_fc2"), hidden, intermediate),
            }
        };
        let positions = format!("{prefix}pos_embed.weight");
        let merger_of = |index: &usize| merger(format!("{}.{index}", names.features), joined);
        Self {
            patch: Pair::flattened(
                &format!("{prefix}patch_embed.proj"),
                &[hidden, CHANNELS, temporal, patch, patch],
            ),
            positions: TensorSpec::matrix(positions, Role::Embedding, side * side, hidden),
            layers: (0..config.layers).map(layer).collect(),
            merger: merger("merger".into(), hidden),
            features: config.mergers.iter().map(merger_of).collect(),
        }
    }

    /// Returns all tensors, in the order of loading.
    fn all(&self) -> impl Iterator<Item = &TensorSpec> {
        let layers = self.layers.iter().flat_map(LayerSpecs::tensors);
        let mergers = std::iter::once(&self.merger).chain(&self.features).flat_map(MergerSpecs::tensors);
        let pairs = std::iter::once(self.patch.tensors()).chain(layers).chain(mergers);
        std::iter::once(&self.positions).chain(pairs.flatten())
    }
}

/// One layer's weights on a device.
pub(super) struct Layer<D: Device> {
    pub attention_norm: NormWeights<D>,
    /// q, k and v, `[3 * hidden, hidden]`.
    pub qkv: LinearWeights<D>,
    pub out: LinearWeights<D>,
    pub mlp_norm: NormWeights<D>,
    pub up: LinearWeights<D>,
    pub down: LinearWeights<D>,
}

/// A merger on a device.
pub(super) struct Merger<D: Device> {
    pub norm: NormWeights<D>,
    pub first: LinearWeights<D>,
    pub second: LinearWeights<D>,
}

impl<D: Device> Merger<D> {
    fn load(specs: &MergerSpecs, loader: &mut Loader<'_, D>) -> Result<Self, LoadError> {
        Ok(Self {
            norm: NormWeights::load(&specs.norm, loader)?,
            first: LinearWeights::load(&[&specs.first], loader)?,
            second: LinearWeights::load(&[&specs.second], loader)?,
        })
    }
}

/// An encoder's weights on a device.
pub(super) struct Weights<D: Device> {
    /// The map from the pixels of a patch.
    pub patch: LinearWeights<D>,
    pub layers: Vec<Layer<D>>,
    pub merger: Merger<D>,
    /// The mergers of features, in the order of the layers behind which they stand.
    pub features: Vec<Merger<D>>,
}

impl<D: Device> Weights<D> {
    /// Loads the weights. Returns them, the table of positions, and their size in bytes.
    pub fn load(
        config: &VisionConfig,
        names: &VisionNames,
        source: Source,
        device: &mut D,
    ) -> Result<(Self, Vec<f32>, u64), LoadError> {
        let specs = Specs::new(config, names);
        // The thinker's progress is reported, which is larger.
        let mut progress = |_| ();
        // Encoders keep their stored type, even if the options quantise the thinker.
        let mut loader = Loader::new(source, Quantize::None, specs.all(), device, &mut progress)?;
        let positions = loader.host(&specs.positions)?;
        let layer = |layer: &LayerSpecs, loader: &mut Loader<'_, D>| {
            Ok::<_, LoadError>(Layer {
                attention_norm: NormWeights::load(&layer.attention_norm, loader)?,
                qkv: LinearWeights::load(&[&layer.qkv], loader)?,
                out: LinearWeights::load(&[&layer.out], loader)?,
                mlp_norm: NormWeights::load(&layer.mlp_norm, loader)?,
                up: LinearWeights::load(&[&layer.up], loader)?,
                down: LinearWeights::load(&[&layer.down], loader)?,
            })
        };
        let weights = Self {
            patch: LinearWeights::load(&[&specs.patch], &mut loader)?,
            layers: specs.layers.iter().map(|specs| layer(specs, &mut loader)).collect::<Result<_, _>>()?,
            merger: Merger::load(&specs.merger, &mut loader)?,
            features: specs
                .features
                .iter()
                .map(|specs| Merger::load(specs, &mut loader))
                .collect::<Result<_, _>>()?,
        };
        Ok((weights, positions, loader.finish()))
    }
}
