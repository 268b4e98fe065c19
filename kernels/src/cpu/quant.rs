//! Weights that are stored in fewer bits than a product computes with: a scale or an exponent per group of inputs.

pub(super) mod block_float;
pub(super) mod int8;
