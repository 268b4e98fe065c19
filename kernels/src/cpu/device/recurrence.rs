//! Linear recurrences over slots, computed row by row.

use super::CpuDevice;
use crate::cpu::memory::{Planes, Tensor, Vector};
use crate::{DecayedSum, DeviceError, Recurrence, SlotId};

impl Recurrence for CpuDevice {
    const IMPLEMENTED: bool = true;

    fn decayed_sum(
        &mut self,
        operands: DecayedSum<'_, Tensor, Vector, Planes>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let DecayedSum { x, decay, planes, plane, layer } = operands;
        let (tokens, width) = (self.step.token_rows(), x.width());
        if x.live() != tokens {
            return Err(DeviceError::Misuse(format!("{} rows of input for {tokens} tokens", x.live())));
        }
        let decay = decay.read(width)?;
        let out = self.step.pad(out.written(tokens, width)?, width);
        let bytes = width * size_of::<f32>();
        for row in &self.step.rows {
            let elements = row.first_token * width..(row.first_token + row.tokens) * width;
            if row.slot == SlotId::NULL {
                out[elements].fill(0.0);
                continue;
            }
            let state = planes.slots.state(plane, row.slot, layer * bytes, bytes)?;
            let mut sums: Vec<f32> = state.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
            for (x, out) in
                x.values()[elements.clone()].chunks_exact(width).zip(out[elements].chunks_exact_mut(width))
            {
                for (((sum, decay), x), out) in sums.iter_mut().zip(decay).zip(x).zip(out) {
                    *sum = *decay * *sum + x;
                    *out = *sum;
                }
            }
            for (bytes, sum) in state.as_chunks_mut().0.iter_mut().zip(&sums) {
                *bytes = sum.to_le_bytes();
            }
        }
        Ok(())
    }
}
