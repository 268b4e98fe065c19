//! Mixtures of experts, which this device does not run yet: a model with experts is refused when it is loaded.

use super::CudaDevice;
use crate::Experts;

impl Experts for CudaDevice {
    const IMPLEMENTED: bool = false;
}
