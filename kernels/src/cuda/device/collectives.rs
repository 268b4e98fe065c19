//! Operations over all ranks of a TP group. This device is alone: groups of GPUs need NCCL.

use super::CudaDevice;
use crate::cuda::tensor::Tensor;
use crate::{Collectives, DeviceError};

impl Collectives for CudaDevice {
    fn all_reduce(&mut self, _: &mut Tensor) -> Result<(), DeviceError> {
        Ok(())
    }

    fn all_reduce_add(&mut self, x: &mut Tensor, out: &mut Tensor) -> Result<(), DeviceError> {
        out.check(x.live, x.width)?;
        self.add(x, out)
    }

    fn gather_columns(&mut self, part: &Tensor, out: Option<&mut Tensor>) -> Result<(), DeviceError> {
        let Some(out) = out else {
            return Err(DeviceError::Misuse("columns are gathered at rank 0 alone".to_owned()));
        };
        out.written_like(part, part.width)?;
        out.data.copy_from(0, &part.data, 0, part.elements() * size_of::<f32>())
    }
}
