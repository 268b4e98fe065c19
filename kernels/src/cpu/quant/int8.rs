//! Weights and activations in eight bits (W8A8). Weights are quantised when they are loaded.
//!
//! The weights of an output are cut into *groups* of [`GROUP`](format::GROUP) inputs. Each group has its own scale: the
//! largest magnitude in the group divided by 127. The weights of the group are rounded to multiples of the scale.
//! Activations are quantised in the same way before each matrix product, with a scale per group and row. The products
//! within a group are summed exactly in integers, and the sum is scaled once:
//!
//! ```text
//! y[o] = Σ over groups g, in order: Σ over inputs i of g (w[o,i] · x[i]) · (w_scale[o,g] · x_scale[g])
//! ```
//!
//! Here, `o` is an output, `w` and `x` are quantised weights and activations, and `w_scale` and `x_scale` are the
//! scales of their groups. The sum over groups starts with zero. If the epilogue adds the product to the output, the
//! sum starts with the output's old value instead. A bias is added last.
//!
//! Each operation is either exact or has one defined rounding (a group's sum is scaled and added with one rounding), so
//! the bits are the same on every instruction path and in any batch. A rank's share of the inputs consists of whole
//! groups if the share's length is a multiple of [`GROUP`](format::GROUP); the ranks then hold the same quantised
//! numbers as a single device. Embeddings can be read from the bytes of an LM head, so a table that a model uses for
//! both is held once.
//!
//! A panel of sixteen outputs is a sequence of groups. A group is sixteen f32 scales and then steps. A step is sixteen
//! outputs by as many inputs as the path's dot product takes (`Simd::DOT_INPUTS`). 128 is added to each weight when it
//! is stored, since one operand of the dot-product instructions is unsigned. This adds 128 times the sum of the group's
//! activations to each integer sum. The initial value of the integer sum compensates for that.

mod activations;
mod format;
mod micro_kernel;
mod pack;
mod product;
pub(super) mod quantise;
mod screen;

pub(super) use activations::row_words;
pub(super) use format::GROUP;
pub use format::Int8Matrix;
pub(super) use pack::widen;
pub(in crate::cpu) use product::linear;
pub(in crate::cpu) use screen::{RowNorms, Screen};
