//! A view of an LM head's screen for integration tests. Nothing else needs it.
//!
//! The test that compares bounds with products is an integration test: a unit test that computes products would compile
//! all kernels a second time.

use super::{RowBound, TINY};
use crate::DeviceError;
use crate::cpu::gemm::Layout;
use crate::cpu::gemm::input::Input;
use crate::cpu::memory::matrix::Matrix;
use crate::cpu::memory::{Tensor, Weights};
use crate::cpu::quant::int8::{RowNorms, Screen};
use crate::cpu::simd::Isa;
use crate::cpu::simd::isa::Path;

/// The bounds of one row of activations.
pub struct RowBounds {
    /// True if all logits are finite.
    pub sound: bool,
    /// The bounds of the panels of sixteen outputs.
    pub panels: Vec<PanelBound>,
}

/// The bound of a panel's outputs.
#[derive(Clone, Copy)]
pub struct PanelBound {
    /// The largest difference of a logit from its sum in the screen.
    pub bound: f32,
    /// The norm of the activations times the norm of an output's weights, both in the form that the exact product
    /// reads.
    pub size: f32,
}

/// Returns the screen of an LM head as a weight matrix; `None` if the head has no screen.
pub fn screen(head: &Weights) -> Option<&Weights> {
    Some(parts(head)?.1.head())
}

/// Returns the bounds of row `row` of `x`; `None` if the head has no screen.
pub fn bounds(isa: Isa, head: &Weights, x: &Tensor, row: usize) -> Result<Option<RowBounds>, DeviceError> {
    let path = Path::new(isa)?;
    let Some((matrix, screen)) = parts(head) else { return Ok(None) };
    let (inputs, input) = (matrix.shape.inputs, Input { values: x.values(), norm: None });
    let norms = RowNorms::of(path, input, row, inputs, Layout::of(&matrix.data));
    let of = RowBound::new(norms, inputs, screen.most);
    let panels = screen.weights.iter().zip(&screen.errors).map(|(weights, errors)| PanelBound {
        bound: of.weights * weights + of.errors * errors + TINY,
        size: norms.exact * weights,
    });
    Ok(Some(RowBounds { sound: of.sound, panels: panels.collect() }))
}

fn parts(head: &Weights) -> Option<(&Matrix, &Screen)> {
    match head {
        Weights::Stored(matrix) => Some((matrix, matrix.screen.as_deref()?)),
        Weights::Int8(_) | Weights::Grouped(_) => None,
    }
}
