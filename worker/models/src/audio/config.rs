//! The checked keys of an `audio_config`.

use tutti_kernels::WeightType;

use crate::{
    LoadError,
    config::{
        keys::Keys,
        ranges::{self, product},
    },
};

/// Frames per chunk. The reference computes numbers of tokens for this length only.
pub(crate) const CHUNK: usize = 100;

/// The checked shape of an audio encoder. Defaults are those of transformers' `Qwen3OmniMoeAudioEncoderConfig`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AudioConfig {
    /// Bins of a log-mel frame.
    pub bins: usize,
    pub layers: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub heads: usize,
    /// Channels of the convolutions.
    pub channels: usize,
    /// Elements per embedding.
    pub out: usize,
    /// Number of chunks whose tokens see each other.
    pub chunks_per_window: usize,
    /// Type of dummy weights.
    pub dtype: WeightType,
}

impl AudioConfig {
    /// Reads and checks the keys. Embeddings must be as wide as the thinker's residual stream, `hidden_size`.
    pub fn read(keys: &Keys<'_>, hidden_size: usize, dtype: WeightType) -> Result<Self, LoadError> {
        let half_chunk = keys.get_or(&ranges::N_WINDOW, CHUNK / 2)?;
        if half_chunk * 2 != CHUNK {
            let problem = format!("must be {}, not {half_chunk}", CHUNK / 2);
            return Err(keys.invalid(&ranges::N_WINDOW, problem));
        }
        keys.get(&ranges::ACTIVATION_FUNCTION)?;
        let window = keys.get_or(&ranges::N_WINDOW_INFER, 800)?;
        let config = Self {
            bins: keys.get_or(&ranges::NUM_MEL_BINS, 128)?,
            layers: keys.get_or(&ranges::ENCODER_LAYERS, 32)?,
            hidden: keys.get_or(&ranges::D_MODEL, 1280)?,
            intermediate: keys.get_or(&ranges::ENCODER_FFN_DIM, 5120)?,
            heads: keys.get_or(&ranges::ENCODER_ATTENTION_HEADS, 20)?,
            channels: keys.get_or(&ranges::DOWNSAMPLE_HIDDEN_SIZE, 480)?,
            out: keys.get_or(&ranges::OUTPUT_DIM, 3584)?,
            chunks_per_window: window / CHUNK,
            dtype,
        };
        config.check(keys, hidden_size)?;
        Ok(config)
    }

    fn check(&self, keys: &Keys<'_>, hidden_size: usize) -> Result<(), LoadError> {
        let Self { hidden, heads, out, .. } = *self;
        // Half of the elements are sines, of at least two wavelengths.
        if !hidden.is_multiple_of(2) || hidden < 4 {
            return Err(keys.invalid(&ranges::D_MODEL, format!("must be even and at least 4, not {hidden}")));
        }
        if !hidden.is_multiple_of(heads) {
            let problem = format!("{heads} do not divide d_model, {hidden}");
            return Err(keys.invalid(&ranges::ENCODER_ATTENTION_HEADS, problem));
        }
        if out != hidden_size {
            let problem = format!("must be the text model's hidden_size, {hidden_size}, not {out}");
            return Err(keys.invalid(&ranges::OUTPUT_DIM, problem));
        }
        if self.chunks_per_window == 0 {
            return Err(keys.invalid(&ranges::N_WINDOW_INFER, format!("must be at least {CHUNK}")));
        }
        let hidden = ("d_model", hidden);
        let channels = ("downsample_hidden_size", self.channels);
        let sizes = [
            product([hidden, ("encoder_ffn_dim", self.intermediate)], ranges::MAX_TENSOR),
            product([hidden, hidden, ("q, k and v", 3)], ranges::MAX_TENSOR),
            product([channels, channels, ("pixels of a window", 9)], ranges::MAX_TENSOR),
            product([channels, ("num_mel_bins", self.bins)], ranges::MAX_WIDTH).and_then(|features| {
                product([("downsample_hidden_size x num_mel_bins", features), hidden], ranges::MAX_TENSOR)
            }),
            product([hidden, ("output_dim", out)], ranges::MAX_TENSOR),
        ];
        sizes.into_iter().try_for_each(|size| size.map(drop)).map_err(|problem| keys.in_file(problem))
    }

    /// Values of a token behind the convolutions: its channels and the bins that are left.
    pub fn features(&self) -> usize {
        self.channels * super::halved(self.bins)
    }
}
