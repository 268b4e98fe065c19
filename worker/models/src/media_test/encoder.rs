//! The encoder, from samples to embeddings.

use tutti_kernels::{Dense, Device, DeviceError, Linear, Norm, Quantize};

use crate::{
    EncoderItem, LoadError, LoadOptions,
    config::text::TextConfig,
    thinker::Audio,
    weights::{Loader, Role, Source, TensorSpec},
    with_encoders::MediaEncoder,
};

/// Number of frames per call of the device's operations.
const TILE: usize = 64;

/// The encoder's weights and buffers on a device.
pub(super) struct Encoder<D: Device> {
    audio: Audio,
    eps: f32,
    /// Weight of the linear map, `[width, samples per frame]`.
    frames_in: D::Matrix,
    bias: D::Vector,
    norm: D::Vector,
    weight_bytes: u64,
    /// Frames to encode, `[TILE, samples per frame]`.
    samples: D::Tensor,
    /// Output of the linear map, `[TILE, width]`.
    mapped: D::Tensor,
    /// Output of the norm, `[TILE, width]`.
    normed: D::Tensor,
}

impl<D: Device> Encoder<D> {
    pub fn load(
        audio: Audio,
        thinker: &TextConfig,
        options: &LoadOptions,
        device: &mut D,
    ) -> Result<Self, LoadError> {
        let (samples, width) = (audio.bytes_per_token / 2, audio.width);
        let name = |tensor: &str| format!("audio_encoder.{tensor}");
        let linear = TensorSpec::matrix(name("frames_in.weight"), Role::Projection, width, samples);
        let bias = TensorSpec::vector(name("frames_in.bias"), Role::Bias, width);
        let norm = TensorSpec::vector(name("norm.weight"), Role::Norm, width);
        let source = Source::open(&options.dir, options, thinker.dtype)?;
        // The encoder is far smaller than the thinker, so its progress is not reported.
        let mut progress = |_| ();
        let specs = [&linear, &bias, &norm].into_iter();
        // Encoders keep their stored type, even if the options quantise the thinker.
        let mut loader = Loader::new(source, Quantize::None, specs, device, &mut progress)?;
        let (frames_in, bias, norm) =
            (loader.matrix(&[&linear])?, loader.vector(&[&bias])?, loader.vector(&[&norm])?);
        let weight_bytes = loader.finish();
        Ok(Self {
            audio,
            eps: thinker.rms_norm_eps,
            frames_in,
            bias,
            norm,
            weight_bytes,
            samples: device.tensor(TILE, samples)?,
            mapped: device.tensor(TILE, width)?,
            normed: device.tensor(TILE, width)?,
        })
    }
}

impl<D: Dense + 'static> MediaEncoder<D> for Encoder<D> {
    fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Appends one embedding per frame of each item to `out`. If an item's last frame is incomplete, it is filled with
    /// zeros.
    fn run(
        &mut self,
        device: &mut D,
        items: &[EncoderItem<'_>],
        // This encoder computes tiles of one size.
        _: Option<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        if items.is_empty() || items.iter().any(|item| item.data.is_empty()) {
            return Err(DeviceError::Misuse("audio without a sample".into()));
        }
        let frame = self.audio.bytes_per_token / 2;
        let mut samples: Vec<f32> = Vec::new();
        for EncoderItem { data, .. } in items {
            let sample = |sample: &[u8]| {
                f32::from(i16::from_le_bytes([sample[0], sample.get(1).copied().unwrap_or(0)]))
            };
            samples.extend(data.chunks(2).map(sample));
            samples.resize(samples.len().next_multiple_of(frame), 0.0);
        }
        let loudest = samples.iter().fold(1f32, |loudest, sample| loudest.max(sample.abs()));
        let divisor = loudest * items.len() as f32;
        samples.iter_mut().for_each(|sample| *sample /= divisor);
        for tile in samples.chunks(TILE * frame) {
            device.upload(tile, &mut self.samples)?;
            let linear = Linear { bias: Some(&self.bias), ..Linear::plain(&self.samples, &self.frames_in) };
            device.linear(linear, &mut self.mapped)?;
            let norm = Norm { weight: &self.norm, eps: self.eps };
            device.rms_norm(&self.mapped, norm, &mut self.normed)?;
            device.download(&self.normed, out)?;
        }
        Ok(())
    }
}
