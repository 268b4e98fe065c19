//! Linear recurrences over slots.

use super::CudaDevice;
use crate::cuda::kernels::{Grid, arguments};
use crate::cuda::planes::Planes;
use crate::cuda::tensor::{Tensor, Vector};
use crate::{DecayedSum, DeviceError, Recurrence};

const THREADS: u32 = 128;

impl Recurrence for CudaDevice {
    const IMPLEMENTED: bool = true;

    fn decayed_sum(
        &mut self,
        operands: DecayedSum<'_, Tensor, Vector, Planes>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let DecayedSum { x, decay, planes, plane, layer } = operands;
        let (tokens, width) = (self.step.tokens, x.width);
        let all = self.step.token_rows;
        if x.live != all {
            return Err(DeviceError::Misuse(format!("{} rows of input for {all} tokens", x.live)));
        }
        let decay = decay.read(width)?;
        out.written(all, width)?;
        out.clear_from(tokens)?;
        let bytes = width * size_of::<f32>();
        let (states, stride) = planes.states(plane, layer * bytes, bytes)?;
        let rows = self.step.row_count;
        let operands = arguments![
            x.at(),
            decay,
            self.step.at.rows,
            rows as u32,
            tokens as u32,
            width as u32,
            states,
            stride,
            out.at(),
        ];
        let grid =
            Grid { blocks: (width.div_ceil(THREADS as usize), rows), threads: THREADS, shared_bytes: 0 };
        self.kernels.launch("decayed_sum", grid, operands)
    }
}
