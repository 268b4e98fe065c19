//! The tensors of an audio encoder in the checkpoint and on a device.

use tutti_kernels::{Device, Quantize};

use super::config::AudioConfig;
use crate::{
    LoadError,
    encoder_weights::{LinearWeights, NormWeights, Pair},
    weights::{Loader, Role, Source, TensorSpec},
};

/// Prefix of the names of all tensors.
const PREFIX: &str = "thinker.audio_tower.";

/// The tensors of one layer.
struct LayerSpecs {
    attention_norm: Pair,
    qkv: [Pair; 3],
    out: Pair,
    mlp_norm: Pair,
    up: Pair,
    down: Pair,
}

impl LayerSpecs {
    fn tensors(&self) -> [[&TensorSpec; 2]; 8] {
        let Self { attention_norm, qkv: [q, k, v], out, mlp_norm, up, down } = self;
        [attention_norm, q, k, v, out, mlp_norm, up, down].map(Pair::tensors)
    }
}

/// The tensors of an encoder.
struct Specs {
    convolutions: [Pair; 3],
    features: TensorSpec,
    layers: Vec<LayerSpecs>,
    norm: Pair,
    first: Pair,
    second: Pair,
}

impl Specs {
    fn new(config: &AudioConfig) -> Self {
        let AudioConfig { hidden, intermediate, channels, out, .. } = *config;
        let name = |module: &str| format!("{PREFIX}{module}");
        let convolution = |index: usize, inputs| {
            Pair::flattened(&name(&format!("conv2d{index}")), &[channels, inputs, 3, 3])
        };
        let layer = |index: usize| {
            let name = |module: &str| name(&format!("layers.{index}.{module}"));
            let map = |module: &str| Pair::linear(&name(&format!("self_attn.{module}")), hidden, hidden);
            LayerSpecs {
                attention_norm: Pair::norm(&name("self_attn_layer_norm"), hidden),
                qkv: ["q_proj", "k_proj", "v_proj"].map(map),
                out: map("out_proj"),
                mlp_norm: Pair::norm(&name("final_layer_norm"), hidden),
                up: Pair::linear(&name("fc1"), intermediate, hidden),
                down: Pair::linear(&name("fc2"), hidden, intermediate),
            }
        };
        Self {
            convolutions: [convolution(1, 1), convolution(2, channels), convolution(3, channels)],
            features: TensorSpec::matrix(
                name("conv_out.weight"),
                Role::Projection,
                hidden,
                config.features(),
            ),
            layers: (0..config.layers).map(layer).collect(),
            norm: Pair::norm(&name("ln_post"), hidden),
            first: Pair::linear(&name("proj1"), hidden, hidden),
            second: Pair::linear(&name("proj2"), out, hidden),
        }
    }

    /// Returns all tensors, in the order of loading.
    fn all(&self) -> impl Iterator<Item = &TensorSpec> {
        let ends = [&self.norm, &self.first, &self.second].into_iter().map(Pair::tensors);
        let convolutions = self.convolutions.iter().map(Pair::tensors);
        let pairs = convolutions.chain(self.layers.iter().flat_map(LayerSpecs::tensors)).chain(ends);
        std::iter::once(&self.features).chain(pairs.flatten())
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

/// An encoder's weights on a device.
pub(super) struct Weights<D: Device> {
    /// The convolutions as maps from windows of pixels, `[channels, channels * 9]`.
    pub convolutions: [LinearWeights<D>; 3],
    /// The map from the output of the convolutions, `[hidden, features]`.
    pub features: D::Matrix,
    pub layers: Vec<Layer<D>>,
    pub norm: NormWeights<D>,
    pub first: LinearWeights<D>,
    pub second: LinearWeights<D>,
}

impl<D: Device> Weights<D> {
    /// Loads the weights. Returns them and their size in bytes.
    pub fn load(config: &AudioConfig, source: Source, device: &mut D) -> Result<(Self, u64), LoadError> {
        let specs = Specs::new(config);
        // The thinker's progress is reported, which is larger.
        let mut progress = |_| ();
        // Encoders keep their stored type, even if the options quantise the thinker.
        let mut loader = Loader::new(source, Quantize::None, specs.all(), device, &mut progress)?;
        let features = loader.matrix(&[&specs.features])?;
        let [one, two, three] = &specs.convolutions;
        let convolutions = [
            LinearWeights::load(&[one], &mut loader)?,
            LinearWeights::load(&[two], &mut loader)?,
            LinearWeights::load(&[three], &mut loader)?,
        ];
        let layer = |layer: &LayerSpecs, loader: &mut Loader<'_, D>| {
            Ok::<_, LoadError>(Layer {
                attention_norm: NormWeights::load(&layer.attention_norm, loader)?,
                qkv: LinearWeights::load(&layer.qkv.each_ref(), loader)?,
                out: LinearWeights::load(&[&layer.out], loader)?,
                mlp_norm: NormWeights::load(&layer.mlp_norm, loader)?,
                up: LinearWeights::load(&[&layer.up], loader)?,
                down: LinearWeights::load(&[&layer.down], loader)?,
            })
        };
        let weights = Self {
            convolutions,
            features,
            layers: specs.layers.iter().map(|specs| layer(specs, &mut loader)).collect::<Result<_, _>>()?,
            norm: NormWeights::load(&specs.norm, &mut loader)?,
            first: LinearWeights::load(&[&specs.first], &mut loader)?,
            second: LinearWeights::load(&[&specs.second], &mut loader)?,
        };
        Ok((weights, loader.finish()))
    }
}
