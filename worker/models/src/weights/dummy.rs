//! Seeded random weights in real shapes, for `--load-format dummy`.

use half::{bf16, f16};
use tutti_kernels::{Device, DeviceError, WeightType};

use super::{Precision, Role, TensorSpec, Values, Window, convert};

/// Number of elements per task of a thread.
const TASK_ELEMENTS: usize = 1 << 16;

/// A source of seeded random weights. Element `i` of a tensor is a function of (seed, name, `i`), so an element is the
/// same on every rank and in any order of drawing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dummy {
    /// Seed of all tensors.
    pub seed: u64,
    /// The type of all tensors whose spec gives no type.
    pub dtype: WeightType,
}

impl Dummy {
    /// Returns the type of a tensor.
    pub fn dtype(&self, spec: &TensorSpec) -> WeightType {
        match spec.precision {
            Precision::Type(dtype) => dtype,
            Precision::Configured | Precision::Stored => self.dtype,
        }
    }

    /// Draws the elements of a window of a tensor on the device's threads. Returns them as little-endian bytes, row by
    /// row.
    pub fn bytes<D: Device>(
        &self,
        device: &mut D,
        spec: &TensorSpec,
        window: &Window,
    ) -> Result<Vec<u8>, DeviceError> {
        let mut bytes = vec![0; window.elements() * self.dtype(spec).bytes()];
        let width = window.columns.len().max(1);
        let rows = (TASK_ELEMENTS / width).max(1);
        let row_bytes = width * self.dtype(spec).bytes();
        convert::fill(device, &mut bytes, rows * row_bytes, &|first, rows| {
            self.fill_rows(spec, window, first / row_bytes, rows);
        })?;
        Ok(bytes)
    }

    /// Fills `bytes` with rows of a window, from the window's row `first` on. Norms are ones on the device, and biases
    /// are zeros. All other tensors are uniformly random, with a variance that keeps activations near unit size.
    fn fill_rows(&self, spec: &TensorSpec, window: &Window, first: usize, bytes: &mut [u8]) {
        let dtype = self.dtype(spec);
        let deviation = match spec.role {
            Role::Norm if spec.values == Values::PlusOne => return constant(dtype, 0.0, bytes),
            Role::Norm => return constant(dtype, 1.0, bytes),
            Role::Bias | Role::Indices => return constant(dtype, 0.0, bytes),
            Role::Embedding => 1.0,
            Role::Projection => (spec.dims.columns.max(1) as f32).sqrt().recip(),
        };
        let stream = spec.name.bytes().fold(self.seed, |state, byte| mix(state ^ u64::from(byte)));
        // An element is uniform in -√3σ..√3σ, from 16 random bits, where σ is `deviation`. So the variance is σ².
        let step = 3f32.sqrt() * deviation / 32_768.0;
        let width = window.columns.len();
        // If a window has all columns, its rows are contiguous in the tensor, so they are drawn as one run.
        let run = if width == spec.dims.columns { bytes.len() } else { width * dtype.bytes() };
        for (index, run) in bytes.chunks_mut(run.max(1)).enumerate() {
            let row = window.rows.start + first + index;
            let at =
                window.matrix * spec.dims.matrix_elements() + row * spec.dims.columns + window.columns.start;
            match dtype {
                WeightType::F32 => fill(run, stream, at, |r| (f32::from(r) * step).to_le_bytes()),
                WeightType::F16 => {
                    fill(run, stream, at, |r| f16::from_f32(f32::from(r) * step).to_le_bytes())
                }
                // Truncates to bf16 instead of rounding, which is far faster. For random numbers, the difference does
                // not matter.
                WeightType::Bf16 => {
                    fill(run, stream, at, |r| (((f32::from(r) * step).to_bits() >> 16) as u16).to_le_bytes());
                }
            }
        }
    }
}

/// Fills `bytes` with one value.
fn constant(dtype: WeightType, value: f32, bytes: &mut [u8]) {
    match dtype {
        WeightType::F32 => bytes.as_chunks_mut().0.fill(value.to_le_bytes()),
        WeightType::F16 => bytes.as_chunks_mut().0.fill(f16::from_f32(value).to_le_bytes()),
        WeightType::Bf16 => bytes.as_chunks_mut().0.fill(bf16::from_f32(value).to_le_bytes()),
    }
}

/// Fills `bytes` with elements of `N` bytes, from the tensor's element `first` on. Each random `u64` gives four
/// elements.
fn fill<const N: usize>(bytes: &mut [u8], stream: u64, first: usize, element: impl Fn(i16) -> [u8; N]) {
    let draw = |block: usize, lane: usize, elements: &mut [u8]| {
        let word = mix(stream.wrapping_add(block as u64));
        for (lane, out) in (lane..4).zip(elements.chunks_mut(N)) {
            out.copy_from_slice(&element((word >> (16 * lane)) as i16));
        }
    };
    // If element `first` is not the first of the four elements of a `u64`, `begun` elements come from the rest of that
    // `u64`. Otherwise `begun` is 0.
    let begun = (first.next_multiple_of(4) - first).min(bytes.len() / N);
    let (head, whole) = bytes.split_at_mut(begun * N);
    draw(first / 4, first % 4, head);
    for (block, four) in whole.chunks_mut(4 * N).enumerate() {
        draw(first.div_ceil(4) + block, 0, four);
    }
}

/// SplitMix64's output function (Steele, Lea, Flood, OOPSLA 2014), over a Weyl sequence.
fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests;
