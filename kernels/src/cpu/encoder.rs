//! Kernels of encoders: norms and activations of rows, rotation, attention in segments, and gathering for convolutions.

pub(in crate::cpu) mod attention;
pub(in crate::cpu) mod convolution;
pub(in crate::cpu) mod rows;
