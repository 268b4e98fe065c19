//! Seeded random weights in real shapes, for `--load-format dummy`.

use half::{bf16, f16};
use tutti_kernels::WeightType;

use super::{Role, ShardRange, TensorSpec};

/// A source of seeded random weights. Element `i` of a tensor is a function of (seed, name, `i`), so a shard does not
/// depend on the rank that draws it, nor on the order of drawing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dummy {
    /// Seed of all tensors.
    pub seed: u64,
    /// The type of all weights.
    pub dtype: WeightType,
}

impl Dummy {
    /// Returns the elements of a tensor that `range` covers, little endian. Norms consist of ones and biases of zeros.
    /// All other tensors are uniformly random, with the variance that keeps activations near unit size.
    pub fn bytes(&self, spec: &TensorSpec, range: &ShardRange) -> Vec<u8> {
        let deviation = match spec.role {
            Role::Norm => return self.constant(range, 1.0),
            Role::Bias => return self.constant(range, 0.0),
            Role::Embedding => 1.0,
            Role::Projection => (spec.rows_columns().1.max(1) as f32).sqrt().recip(),
        };
        let stream = spec.name.bytes().fold(self.seed, |state, byte| mix(state ^ u64::from(byte)));
        // Sixteen random bits per element, uniform in -√3σ..√3σ, where σ is `deviation`: the variance is σ².
        let step = 3f32.sqrt() * deviation / 32_768.0;
        let mut bytes = vec![0; range.elements() * self.dtype.bytes()];
        let mut rest = &mut bytes[..];
        let width = if spec.shape.len() == 2 { spec.shape[1] } else { 1 };
        for run in range.runs(width) {
            let (now, later) = rest.split_at_mut(run.len() * self.dtype.bytes());
            rest = later;
            let first = run.start;
            match self.dtype {
                WeightType::F32 => fill(now, stream, first, |r| (f32::from(r) * step).to_le_bytes()),
                WeightType::F16 => {
                    fill(now, stream, first, |r| f16::from_f32(f32::from(r) * step).to_le_bytes());
                }
                // Truncated, not rounded: the result is as random, and truncation is far faster.
                WeightType::Bf16 => fill(now, stream, first, |r| {
                    (((f32::from(r) * step).to_bits() >> 16) as u16).to_le_bytes()
                }),
            }
        }
        bytes
    }

    fn constant(&self, range: &ShardRange, value: f32) -> Vec<u8> {
        match self.dtype {
            WeightType::F32 => value.to_le_bytes().repeat(range.elements()),
            WeightType::F16 => f16::from_f32(value).to_le_bytes().repeat(range.elements()),
            WeightType::Bf16 => bf16::from_f32(value).to_le_bytes().repeat(range.elements()),
        }
    }
}

/// Fills `bytes` with the tensor's elements from index `first` on, `N` bytes each. Each random `u64` gives four
/// elements.
fn fill<const N: usize>(bytes: &mut [u8], stream: u64, first: usize, element: impl Fn(i16) -> [u8; N]) {
    let draw = |block: usize, lane: usize, elements: &mut [u8]| {
        let word = mix(stream.wrapping_add(block as u64));
        for (lane, out) in (lane..4).zip(elements.chunks_mut(N)) {
            out.copy_from_slice(&element((word >> (16 * lane)) as i16));
        }
    };
    // Element `first` may lie inside the four elements of a `u64`. `begun` elements then come from the rest of that
    // `u64`. `begun` is 0 if `first` is the first element of its `u64`.
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
