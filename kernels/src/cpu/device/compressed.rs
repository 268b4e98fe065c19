//! Windows and compressed entries.

use super::CpuDevice;
use crate::Compressed;

impl Compressed for CpuDevice {
    const IMPLEMENTED: bool = false;
}
