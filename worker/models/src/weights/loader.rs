//! Loads tensors onto a device one by one, and reports progress.

use half::{bf16, f16};
use tutti_kernels::{Device, DeviceError, HostMatrix, Quantize, WeightType, collective::GroupRank};

use super::{Dummy, SafetensorsDir, TensorSpec};
use crate::LoadError;

/// Progress of loading weights onto a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes loaded so far.
    pub done: u64,
    /// Bytes to load in total.
    pub total: u64,
}

/// A callback for progress.
pub(crate) type Progress<'a> = &'a mut dyn FnMut(LoadProgress);

/// The source of tensors.
pub(crate) enum Source {
    /// A checkpoint's files.
    Files(SafetensorsDir),
    /// Random numbers from a seed.
    Dummy(Dummy),
}

impl Source {
    fn check(&self, spec: &TensorSpec) -> Result<WeightType, LoadError> {
        match self {
            Self::Files(files) => files.check(spec),
            Self::Dummy(dummy) => Ok(dummy.dtype),
        }
    }
}

/// Loads this rank's shard of a family's tensors from a source onto a device.
pub(crate) struct Loader<'a, D: Device> {
    source: Source,
    quantize: Quantize,
    device: &'a mut D,
    progress: Progress<'a>,
    state: LoadProgress,
    /// Bytes of the tensors loaded so far, as the device holds them.
    held: u64,
}

impl<'a, D: Device> Loader<'a, D> {
    /// Checks the presence, shape and type of every tensor of `specs` before any is read, so that a bad checkpoint
    /// fails at once.
    pub fn new<'s>(
        source: Source,
        quantize: Quantize,
        specs: impl Iterator<Item = &'s TensorSpec>,
        device: &'a mut D,
        progress: Progress<'a>,
    ) -> Result<Self, LoadError> {
        let (mut total, group_rank) = (0, device.group_rank());
        for spec in specs {
            total += (spec.shard_range(group_rank).elements() * source.check(spec)?.bytes()) as u64;
        }
        let state = LoadProgress { done: 0, total };
        progress(state);
        Ok(Self { source, quantize, device, progress, state, held: 0 })
    }

    /// This rank and the size of its group.
    pub fn group_rank(&self) -> GroupRank {
        self.device.group_rank()
    }

    /// The stored type of a tensor.
    pub fn dtype(&self, spec: &TensorSpec) -> Result<WeightType, LoadError> {
        self.source.check(spec)
    }

    /// Loads several matrices as one, with their rows end to end.
    pub fn matrix(&mut self, specs: &[&TensorSpec]) -> Result<D::Matrix, LoadError> {
        self.load_matrix(specs, |device, fused, quantize| device.matrix(fused, quantize))
    }

    /// Loads gate and up as one matrix.
    pub fn gate_up(&mut self, specs: [&TensorSpec; 2]) -> Result<D::Matrix, LoadError> {
        self.load_matrix(&specs, |device, fused, quantize| match *fused {
            [gate, up] => device.gate_up_matrix([gate, up], quantize),
            _ => Err(DeviceError::Misuse(format!("{} matrices in place of gate and up", fused.len()))),
        })
    }

    fn load_matrix(
        &mut self,
        specs: &[&TensorSpec],
        take: impl FnOnce(&mut D, &[HostMatrix<'_>], Quantize) -> Result<D::Matrix, DeviceError>,
    ) -> Result<D::Matrix, LoadError> {
        let first = self.source.check(specs[0])?;
        for spec in specs {
            let other = self.source.check(spec)?;
            if let (true, Source::Files(files)) = (other != first, &self.source) {
                return Err(files.differs(spec, specs[0]));
            }
        }
        let mut held = Vec::with_capacity(specs.len());
        for spec in specs {
            let range = spec.shard_range(self.group_rank());
            let bytes = match &self.source {
                Source::Files(files) => range.slice(files.view(spec)?),
                Source::Dummy(dummy) => dummy.bytes(spec, &range).into(),
            };
            held.push((range, bytes));
        }
        let views: Vec<_> = held.iter().map(|(range, bytes)| range.view(bytes, first)).collect();
        let matrix = take(self.device, &views, self.quantize)?;
        drop(held);
        if let Source::Files(files) = &mut self.source {
            specs.iter().for_each(|spec| files.release(spec));
        }
        let stored = self.advance(specs)?;
        self.held += match self.quantize {
            // The padding of the device's layout is not counted.
            Quantize::None => stored,
            Quantize::Int8 => self.device.matrix_bytes(&matrix),
        };
        Ok(matrix)
    }

    /// Loads several vectors as one, end to end, widened to f32.
    pub fn vector(&mut self, specs: &[&TensorSpec]) -> Result<D::Vector, LoadError> {
        let mut values = Vec::new();
        for spec in specs {
            let range = spec.shard_range(self.device.group_rank());
            match &mut self.source {
                Source::Files(files) => {
                    let whole = files.view(spec)?;
                    widen(
                        &range.slice(HostMatrix { rows: whole.columns, columns: 1, ..whole }),
                        whole.dtype,
                        &mut values,
                    );
                    files.release(spec);
                }
                Source::Dummy(dummy) => widen(&dummy.bytes(spec, &range), dummy.dtype, &mut values),
            }
        }
        let vector = self.device.vector(&values)?;
        self.held += self.advance(specs)?;
        Ok(vector)
    }

    /// Logs the tensors that the model does not use, and returns the number of bytes of the loaded tensors on the
    /// device.
    pub fn finish(self) -> u64 {
        if let Source::Files(files) = &self.source {
            for tensor in files.unused() {
                tracing::debug!(tensor, "the checkpoint has a tensor that the model does not use");
            }
        }
        self.held
    }

    /// Reports these tensors as loaded. Returns the size of this rank's shard of them, in bytes of their stored type.
    fn advance(&mut self, specs: &[&TensorSpec]) -> Result<u64, LoadError> {
        let mut stored = 0;
        for spec in specs {
            let elements = spec.shard_range(self.group_rank()).elements();
            stored += (elements * self.source.check(spec)?.bytes()) as u64;
        }
        self.state.done += stored;
        (self.progress)(self.state);
        Ok(stored)
    }
}

/// Appends little-endian elements as f32.
fn widen(bytes: &[u8], dtype: WeightType, out: &mut Vec<f32>) {
    let halves = || bytes.as_chunks::<2>().0.iter();
    match dtype {
        WeightType::F32 => out.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b))),
        WeightType::F16 => out.extend(halves().map(|b| f16::from_le_bytes(*b).to_f32())),
        WeightType::Bf16 => out.extend(halves().map(|b| bf16::from_le_bytes(*b).to_f32())),
    }
}
