//! The audio encoder of Qwen3-Omni: convolutions over log-mel frames and a pre-norm transformer, from clips to the
//! embeddings of their tokens.
//!
//! Clips are cut into chunks of [`CHUNK`] frames. All chunks of a call are padded with zeros to the longest one, and
//! the biases of the convolutions make padding leak into the last tokens of shorter chunks. Attention sees windows of a
//! clip whose length also follows from the longest chunk. So the embeddings of a clip depend on the other clips of its
//! call, as in the reference: all clips of a request are encoded together.
//!
//! Paper: "Qwen3-Omni Technical Report", arXiv:2509.17765. Reference: transformers
//! `models/qwen3_omni_moe/modeling_qwen3_omni_moe.py`.

mod config;
mod fourier;
mod mel;
mod weights;

use std::ops::Range;

use tutti_kernels::{
    Dense, Device, DeviceError, Encoder, EncoderHeads, Gelu, Linear, PixelGrid, SegmentAttention,
};

pub(crate) use self::{
    config::{AudioConfig, CHUNK},
    mel::{HOP, MelFilters, RATE, SHORTEST},
};
use self::{
    mel::Mel,
    weights::{Layer, Weights},
};
use crate::{LoadError, LoadOptions, weights::Source};

/// Value that all layer norms add to the variance.
const EPS: f32 = 1e-5;
/// Base of the wavelengths of the sinusoids that are added to tokens.
const LONGEST_WAVE: f64 = 10_000.0;

/// Returns the number of tokens of a clip, or of a chunk, of `frames` frames. Three convolutions halve each chunk.
pub(crate) fn tokens(frames: usize) -> usize {
    frames / CHUNK * halved(CHUNK) + halved(frames % CHUNK)
}

/// Number of convolutions, each of which halves a chunk.
pub(crate) const HALVINGS: u32 = 3;

fn halved(size: usize) -> usize {
    (0..HALVINGS).fold(size, |size, _| size.div_ceil(2))
}

/// An audio encoder on a device, with buffers for one call.
pub(crate) struct AudioEncoder<D: Device> {
    config: AudioConfig,
    weights: Weights<D>,
    convolutions: Convolutions<D>,
    buffers: Buffers<D>,
    weight_bytes: u64,
}

/// Buffers of the convolutions of one chunk, and their channels.
struct Convolutions<D: Device> {
    /// The chunk, `[bins * frames, 1]`.
    input: D::Tensor,
    /// Windows of pixels, the input of each convolution.
    windows: [D::Tensor; 3],
    /// Output of each convolution, `[pixels, channels]`.
    outputs: [D::Tensor; 3],
}

/// Buffers for `T` tokens, the most of a call.
struct Buffers<D: Device> {
    tokens: usize,
    /// Output of the convolutions, `[T, channels * bins]`.
    features: D::Tensor,
    /// The residual stream, `[T, hidden]`.
    hidden: D::Tensor,
    /// Output of a norm, `[T, hidden]`.
    normed: D::Tensor,
    /// q, k and v, `[T, 3 * hidden]`.
    qkv: D::Tensor,
    /// Output of the attention, `[T, hidden]`.
    attended: D::Tensor,
    /// Input of the down projection, `[T, intermediate]`.
    activated: D::Tensor,
    /// Output of the first map behind the layers, `[T, hidden]`.
    mapped: D::Tensor,
    /// Embeddings, `[T, out]`.
    out: D::Tensor,
}

/// The division of the clips of a call.
struct Division {
    /// Frames of each chunk, clip by clip.
    chunks: Vec<usize>,
    /// Frames of the longest chunk.
    longest: usize,
    /// Ranges of tokens that see each other.
    windows: Vec<Range<usize>>,
}

impl Division {
    /// Divides clips of these numbers of frames. `chunks_per_window` chunks of the longest length are a window.
    fn new(clips: &[usize], chunks_per_window: usize) -> Self {
        let of_clip =
            |&frames: &usize| (0..frames.div_ceil(CHUNK)).map(move |it| CHUNK.min(frames - it * CHUNK));
        let chunks: Vec<usize> = clips.iter().flat_map(of_clip).collect();
        let longest = chunks.iter().copied().max().unwrap_or(0);
        let window = (tokens(longest) * chunks_per_window).max(1);
        let (mut windows, mut start) = (Vec::new(), 0);
        for clip in clips.iter().map(|&frames| tokens(frames)) {
            let end = start + clip;
            windows.extend((start..end).step_by(window).map(|first| first..end.min(first + window)));
            start = end;
        }
        Self { chunks, longest, windows }
    }
}

impl<D: Encoder + Dense> AudioEncoder<D> {
    /// Loads the encoder of the checkpoint of `options`, for calls of up to `tokens` tokens.
    pub fn load(
        config: AudioConfig,
        options: &LoadOptions,
        tokens: usize,
        device: &mut D,
    ) -> Result<Self, LoadError> {
        let source = Source::open(&options.dir, options, config.dtype)?;
        let (weights, weight_bytes) = Weights::load(&config, source, device)?;
        let convolutions = Convolutions::allocate(&config, device)?;
        let buffers = Buffers::allocate(&config, tokens, device)?;
        Ok(Self { config, weights, convolutions, buffers, weight_bytes })
    }

    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Encodes all clips of a request. Appends one embedding per token to `out`, clip by clip. `shape` is the number of
    /// tokens to compute, of which the last are padding; `None` for no padding. Convolutions run over chunks, whose
    /// only sizes are those of [`CHUNK`] and, if all clips are shorter, of the longest.
    pub fn run(
        &mut self,
        device: &mut D,
        clips: &[Mel],
        shape: Option<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        let Self { config, weights, convolutions, buffers, .. } = self;
        if clips.is_empty() || clips.iter().any(|clip| clip.frames == 0 || clip.bins != config.bins) {
            let bins = config.bins;
            return Err(DeviceError::Misuse(format!("clips without a frame, or of other than {bins} bins")));
        }
        let lengths: Vec<usize> = clips.iter().map(|clip| clip.frames).collect();
        let count: usize = lengths.iter().map(|&frames| tokens(frames)).sum();
        let padded = shape.unwrap_or(count);
        if padded < count || padded > buffers.tokens {
            let most = buffers.tokens;
            let problem = format!("{count} tokens in one call that computes {padded}, the limit is {most}");
            return Err(DeviceError::Misuse(problem));
        }
        let Division { chunks, longest, mut windows } = Division::new(&lengths, config.chunks_per_window);
        let (mut features, mut positions) = (Vec::new(), Vec::new());
        let of_clips = clips.iter().flat_map(|clip| {
            (0..clip.frames)
                .step_by(CHUNK)
                .map(move |first| clip.padded(first..clip.frames.min(first + CHUNK), longest))
        });
        for (chunk, frames) in of_clips.zip(chunks) {
            convolutions.run(device, weights, &chunk, config.bins, tokens(frames), &mut features)?;
            // Sinusoids restart in each chunk.
            positions.extend((0..tokens(frames)).flat_map(|index| sinusoid(index, config.hidden)));
        }
        // Each token of padding sees itself alone, which costs least.
        windows.extend((count..padded).map(|first| first..first + 1));
        features.resize(padded * config.features(), 0.0);
        device.upload(&features, &mut buffers.features)?;
        device.linear(Linear::plain(&buffers.features, &weights.features), &mut buffers.hidden)?;
        device.add_rows(&mut buffers.hidden, 0, &positions)?;
        let heads = EncoderHeads { heads: config.heads, head_dim: config.hidden / config.heads };
        for layer in &weights.layers {
            buffers.run_layer(device, layer, heads, &windows)?;
        }
        let end = out.len() + count * config.out;
        buffers.end(device, weights, out)?;
        out.truncate(end);
        Ok(())
    }
}

/// Returns what is added to token `index` of a chunk: sines, then cosines.
fn sinusoid(index: usize, width: usize) -> impl Iterator<Item = f32> {
    let half = width / 2;
    let step = -LONGEST_WAVE.ln() / (half - 1) as f64;
    let angle = move |wave: usize| {
        let inverse = (step as f32 * wave as f32).exp();
        f64::from(index as f32 * inverse)
    };
    let sines = (0..half).map(move |wave| angle(wave).sin() as f32);
    sines.chain((0..half).map(move |wave| angle(wave).cos() as f32))
}

impl<D: Encoder + Dense> Convolutions<D> {
    fn allocate(config: &AudioConfig, device: &mut D) -> Result<Self, DeviceError> {
        let grid = PixelGrid { pictures: 1, height: config.bins, width: CHUNK };
        let (mut grids, mut channels) = ([grid; 3], [1, config.channels, config.channels]);
        (1..3).for_each(|index| grids[index] = grids[index - 1].halved());
        let mut windows = Vec::new();
        let mut outputs = Vec::new();
        for (grid, channels) in grids.iter().zip(&mut channels) {
            let pixels = grid.halved().pixels();
            windows.push(device.tensor(pixels, *channels * 9)?);
            outputs.push(device.tensor(pixels, config.channels)?);
        }
        let all = |tensors: Vec<D::Tensor>| {
            tensors.try_into().map_err(|_| DeviceError::Misuse("buffers of three convolutions".into()))
        };
        Ok(Self { input: device.tensor(grid.pixels(), 1)?, windows: all(windows)?, outputs: all(outputs)? })
    }

    /// Runs the convolutions over a chunk, `[bins, frames]`. Appends the first `tokens` tokens of the result to `out`,
    /// each as `[channels, bins]`.
    fn run(
        &mut self,
        device: &mut D,
        weights: &Weights<D>,
        chunk: &[f32],
        bins: usize,
        tokens: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        let Self { input, windows, outputs } = self;
        device.upload(chunk, input)?;
        let mut grid = PixelGrid { pictures: 1, height: bins, width: chunk.len() / bins };
        let mut x = &*input;
        for ((windows, output), weights) in
            windows.iter_mut().zip(outputs.iter_mut()).zip(&weights.convolutions)
        {
            device.gather_convolution(grid, x, windows)?;
            device.linear(weights.operands(windows), output)?;
            device.gelu(Gelu::Exact, output)?;
            grid = grid.halved();
            x = output;
        }
        let mut pixels = Vec::new();
        device.download(x, &mut pixels)?;
        let channels = pixels.len() / grid.pixels();
        for token in 0..tokens {
            for channel in 0..channels {
                out.extend(
                    (0..grid.height).map(|bin| pixels[(bin * grid.width + token) * channels + channel]),
                );
            }
        }
        Ok(())
    }
}

impl<D: Encoder + Dense> Buffers<D> {
    fn allocate(config: &AudioConfig, tokens: usize, device: &mut D) -> Result<Self, DeviceError> {
        let hidden = config.hidden;
        let mut tensor = |width| device.tensor(tokens, width);
        Ok(Self {
            tokens,
            features: tensor(config.features())?,
            hidden: tensor(hidden)?,
            normed: tensor(hidden)?,
            qkv: tensor(3 * hidden)?,
            attended: tensor(hidden)?,
            activated: tensor(config.intermediate)?,
            mapped: tensor(hidden)?,
            out: tensor(config.out)?,
        })
    }

    fn run_layer(
        &mut self,
        device: &mut D,
        layer: &Layer<D>,
        shape: EncoderHeads,
        segments: &[Range<usize>],
    ) -> Result<(), DeviceError> {
        let Self { hidden, normed, qkv, attended, activated, .. } = self;
        device.layer_norm(hidden, layer.attention_norm.operands(EPS), normed)?;
        device.linear(layer.qkv.operands(normed), qkv)?;
        device.segment_attention(SegmentAttention { qkv, shape, segments }, attended)?;
        device.linear_add(layer.out.operands(attended), hidden)?;
        device.layer_norm(hidden, layer.mlp_norm.operands(EPS), normed)?;
        device.linear(layer.up.operands(normed), activated)?;
        device.gelu(Gelu::Exact, activated)?;
        device.linear_add(layer.down.operands(activated), hidden)
    }

    /// Maps the residual stream to embeddings.
    fn end(&mut self, device: &mut D, weights: &Weights<D>, out: &mut Vec<f32>) -> Result<(), DeviceError> {
        device.layer_norm(&self.hidden, weights.norm.operands(EPS), &mut self.normed)?;
        device.linear(weights.first.operands(&self.normed), &mut self.mapped)?;
        device.gelu(Gelu::Exact, &mut self.mapped)?;
        device.linear(weights.second.operands(&self.mapped), &mut self.out)?;
        device.download(&self.out, out)
    }
}

#[cfg(test)]
mod tests;
