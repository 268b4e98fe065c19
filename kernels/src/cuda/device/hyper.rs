//! Hyper-connections.

use super::CudaDevice;
use crate::HyperConnections;

impl HyperConnections for CudaDevice {
    const IMPLEMENTED: bool = false;
}
