//! Mixtures of experts, which this device does not run yet: a model with experts is refused in its first step.

use super::CudaDevice;
use crate::Experts;

impl Experts for CudaDevice {}
