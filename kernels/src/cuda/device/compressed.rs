//! Windows and compressed entries.

use super::CudaDevice;
use crate::Compressed;

impl Compressed for CudaDevice {
    const IMPLEMENTED: bool = false;
}
