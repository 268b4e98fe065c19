//! Linear recurrences whose states are in slots.

use super::CudaDevice;
use crate::cuda::arguments;
use crate::cuda::kernels::Grid;
use crate::cuda::planes::Planes;
use crate::cuda::sources::kernel;
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
        let (state, stride) = planes.states(plane, layer * bytes, bytes)?;
        let rows = self.step.row_count;
        let operands = arguments::DecayedSum {
            x: x.at(),
            decay,
            rows: self.step.at.rows,
            row_count: rows as u32,
            tokens: tokens as u32,
            width: width as u32,
            state,
            stride,
            out: out.at(),
        };
        let grid =
            Grid { blocks: (width.div_ceil(THREADS as usize), rows), threads: THREADS, shared_bytes: 0 };
        self.kernels.launch(kernel::decayed_sum, grid, operands)
    }
}
