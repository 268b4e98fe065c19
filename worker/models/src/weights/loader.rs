//! Hands tensors over to a device one after the other, and says how far it is.

use half::{bf16, f16};
use tutti_kernels::{Device, DeviceError, HostMatrix, Quantize, WeightType, collective::Seat};

use super::{Dummy, SafetensorsDir, TensorSpec};
use crate::LoadError;

/// How much of the weights a device has taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes taken over.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

/// Who is told about progress.
pub(crate) type Progress<'a> = &'a mut dyn FnMut(LoadProgress);

/// Where tensors come from.
pub(crate) enum Source {
    /// A checkpoint's files.
    Files(SafetensorsDir),
    /// Nothing but a seed.
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

/// Hands a family's tensors from a source to a device: of each, what this rank holds of it.
pub(crate) struct Loader<'a, D: Device> {
    source: Source,
    quantize: Quantize,
    device: &'a mut D,
    progress: Progress<'a>,
    state: LoadProgress,
    /// Bytes that the device holds of what it has taken over.
    held: u64,
}

impl<'a, D: Device> Loader<'a, D> {
    /// Checks that every tensor of `specs` is there and as expected, before any is read: a bad checkpoint fails at once.
    pub fn new<'s>(
        source: Source,
        quantize: Quantize,
        specs: impl Iterator<Item = &'s TensorSpec>,
        device: &'a mut D,
        progress: Progress<'a>,
    ) -> Result<Self, LoadError> {
        let (mut total, seat) = (0, device.seat());
        for spec in specs {
            total += (spec.part(seat).elements() * source.check(spec)?.bytes()) as u64;
        }
        let state = LoadProgress { done: 0, total };
        progress(state);
        Ok(Self { source, quantize, device, progress, state, held: 0 })
    }

    /// The rank that loads.
    pub fn seat(&self) -> Seat {
        self.device.seat()
    }

    /// The type in which a tensor is stored.
    pub fn dtype(&self, spec: &TensorSpec) -> Result<WeightType, LoadError> {
        self.source.check(spec)
    }

    /// Hands over matrices as one, the parts' rows one after the other.
    pub fn matrix(&mut self, parts: &[&TensorSpec]) -> Result<D::Matrix, LoadError> {
        self.hand_over(parts, |device, parts, quantize| device.matrix(parts, quantize))
    }

    /// Hands over gate and up.
    pub fn gate_up(&mut self, parts: [&TensorSpec; 2]) -> Result<D::Matrix, LoadError> {
        self.hand_over(&parts, |device, parts, quantize| match *parts {
            [gate, up] => device.gate_up_matrix([gate, up], quantize),
            _ => Err(DeviceError::Misuse(format!("{} parts of gate and up", parts.len()))),
        })
    }

    fn hand_over(
        &mut self,
        parts: &[&TensorSpec],
        take: impl FnOnce(&mut D, &[HostMatrix<'_>], Quantize) -> Result<D::Matrix, DeviceError>,
    ) -> Result<D::Matrix, LoadError> {
        let first = self.source.check(parts[0])?;
        for part in parts {
            let other = self.source.check(part)?;
            if let (true, Source::Files(files)) = (other != first, &self.source) {
                return Err(files.differs(part, parts[0]));
            }
        }
        let mut held = Vec::with_capacity(parts.len());
        for spec in parts {
            let part = spec.part(self.seat());
            let bytes = match &self.source {
                Source::Files(files) => part.of(files.view(spec)?),
                Source::Dummy(dummy) => dummy.bytes(spec, &part).into(),
            };
            held.push((part, bytes));
        }
        let views: Vec<_> = held.iter().map(|(part, bytes)| part.view(bytes, first)).collect();
        let matrix = take(self.device, &views, self.quantize)?;
        drop(held);
        if let Source::Files(files) = &mut self.source {
            parts.iter().for_each(|spec| files.release(spec));
        }
        let stored = self.advance(parts)?;
        self.held += match self.quantize {
            // Not what the device's layout adds at its ends.
            Quantize::None => stored,
            Quantize::Int8 => self.device.matrix_bytes(&matrix),
        };
        Ok(matrix)
    }

    /// Hands over vectors as one, end to end, widened to f32.
    pub fn vector(&mut self, parts: &[&TensorSpec]) -> Result<D::Vector, LoadError> {
        let mut values = Vec::new();
        for spec in parts {
            let part = spec.part(self.device.seat());
            match &mut self.source {
                Source::Files(files) => {
                    let whole = files.view(spec)?;
                    widen(
                        &part.of(HostMatrix { rows: whole.columns, columns: 1, ..whole }),
                        whole.dtype,
                        &mut values,
                    );
                    files.release(spec);
                }
                Source::Dummy(dummy) => widen(&dummy.bytes(spec, &part), dummy.dtype, &mut values),
            }
        }
        let vector = self.device.vector(&values)?;
        self.held += self.advance(parts)?;
        Ok(vector)
    }

    /// Logs what the checkpoint holds beyond what was asked for; gives back the bytes that the device holds.
    pub fn finish(self) -> u64 {
        if let Source::Files(files) = &self.source {
            for tensor in files.unused() {
                tracing::debug!(tensor, "the checkpoint has a tensor that the model does not use");
            }
        }
        self.held
    }

    /// Tells of progress; gives back the bytes that these tensors are stored in.
    fn advance(&mut self, parts: &[&TensorSpec]) -> Result<u64, LoadError> {
        let mut stored = 0;
        for spec in parts {
            let elements = spec.part(self.seat()).elements();
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
