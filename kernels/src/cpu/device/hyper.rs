//! Hyper-connections.

use super::CpuDevice;
use crate::HyperConnections;

impl HyperConnections for CpuDevice {
    const IMPLEMENTED: bool = false;
}
