//! Encoders do not run on GPUs yet: each operation is refused by its name.

use super::CudaDevice;
use crate::Encoder;

impl Encoder for CudaDevice {
    const IMPLEMENTED: bool = false;
}
