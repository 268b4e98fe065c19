//! From logits to tokens: the arg max, log-softmax, truncation and the random draw.

pub(super) mod argmax;
pub(super) mod logits;
pub(super) mod mask;
pub(super) mod nominate;
mod philox;
pub(super) mod sample;
pub(super) mod screen;
mod truncate;
