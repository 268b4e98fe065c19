//! Weights in eight or four bits, with scales of groups of inputs, that stay quantised in memory.
//!
//! Weights are [codes](crate::QuantizedType). Each output has a scale, and possibly a zero point or a minimum, per
//! group of 16 to 128 inputs. There are two kinds of product:
//!
//! - [`DotProduct`](dots::DotProduct): integers of four bits in groups of at least [`BLOCK`](layout::BLOCK) inputs.
//!   Activations are rounded to eight bits with a scale per group and row, as in int8. The products within a group are
//!   summed exactly in integers, and the sum is scaled once, so the bits are the same on every instruction path and in
//!   any batch:
//!
//!   ```text
//!   y[o] = Σ over groups g, in order: Σ over inputs i of g ((w[o,i] - zero[o,g]) · x[i]) · (w_scale[o,g] · x_scale[g])
//!   ```
//!
//!   With minima, each group also subtracts `Σ over inputs i of g x[i] · (minimum[o,g] · x_scale[g])`.
//!
//! - [`WidenedProduct`](widened::WidenedProduct): all codes. Codes are widened to f32 in registers and multiplied by
//!   activations in f32. The products within a group are summed in a fixed order, and the sum is scaled once. The bits
//!   are the same in any batch, and on all paths with fused multiply-adds.
//!
//! A panel of sixteen outputs is a sequence of chunks of 128 inputs: see [`layout`].

mod dots;
mod layout;
mod pack;
mod quantise;
mod rows;
mod widened;

pub(super) use self::dots::most_words as most_dot_words;
pub(in crate::cpu) use self::layout::GroupLayout;
pub use self::layout::GroupedMatrix;
pub(super) use self::quantise::{check_groups, quantise as quantise_group};
pub(in crate::cpu) use self::rows::FusedRows;
pub(super) use self::widened::most_words as most_widened_words;
use crate::DeviceError;
use crate::cpu::gemm::Product;
use crate::cpu::memory::Weights;
use crate::cpu::quant::product::{self, Scratch};
use crate::cpu::simd::isa::Path;
use crate::cpu::threads::pool::ThreadPool;
use crate::device::QuantizedType;

/// The precision of the activations of products whose weights are integers of four bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) enum Activations {
    /// Eight bits with a scale per group.
    EightBits,
    /// f32.
    Full,
}

/// True if a product with weights in this layout multiplies activations in f32.
pub(in crate::cpu) fn is_widened(layout: GroupLayout, activations: Activations) -> bool {
    activations == Activations::Full || !layout.has_dots()
}

/// Computes a matrix product. `scratch` must have room for the product's rows and inputs.
pub(in crate::cpu) fn linear(
    path: Path,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    activations: Activations,
    product: Product<'_>,
) -> Result<(), DeviceError> {
    let Some(group) = product.groups.first() else { return Ok(()) };
    let layout = matrix(&product.matrices[group.matrix]).layout;
    if !is_widened(layout, activations) {
        return product::linear(path, pool, scratch, product, |weights| dots::DotProduct(matrix(weights)));
    }
    match layout.codes {
        QuantizedType::Int4 | QuantizedType::E2m1 => {
            product::linear(path, pool, scratch, product, |weights| {
                widened::WidenedProduct::<widened::Nibbles>::new(matrix(weights))
            })
        }
        QuantizedType::Int8 => product::linear(path, pool, scratch, product, |weights| {
            widened::WidenedProduct::<widened::Integers>::new(matrix(weights))
        }),
        QuantizedType::E4m3 => product::linear(path, pool, scratch, product, |weights| {
            widened::WidenedProduct::<widened::Floats>::new(matrix(weights))
        }),
    }
}

/// Returns the matrix in this form.
fn matrix(weights: &Weights) -> &GroupedMatrix {
    let Weights::Grouped(matrix) = weights else { unreachable!("a matrix without groups") };
    matrix
}
