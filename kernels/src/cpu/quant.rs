//! Weights as small integers, with one scale or exponent per group of inputs.

pub(super) mod block_float;
pub(super) mod int8;
