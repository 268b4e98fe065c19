//! Weights as small integers or floats, with one scale or exponent per group of inputs.

pub(super) mod block_float;
pub(super) mod grouped;
pub(super) mod int8;
mod product;
mod rows;

pub(super) use product::Scratch;
pub(crate) use rows::RowQuantiser;
