//! The gated delta rule, whose states are in slots.

use super::CudaDevice;
use crate::cuda::arguments::{self, DeltaInputs};
use crate::cuda::kernels::Grid;
use crate::cuda::planes::Planes;
use crate::cuda::sources::{Kernel, kernel};
use crate::cuda::tensor::{Tensor, Vector};
use crate::{DeltaRule, DeltaShape, DeviceError, GatedDelta, GatedNorm};

/// Threads per block of all kernels here: four warps.
const THREADS: u32 = 128;
const WARPS: usize = 4;
/// Tokens that a thread block of `sources/delta_inputs.cu` computes.
const TILE_TOKENS: usize = 16;
/// Columns of a state matrix that a thread block of `sources/delta_rule.cu` updates.
const COLUMNS: usize = 32;

impl DeltaRule for CudaDevice {
    const IMPLEMENTED: bool = true;

    fn delta_rule(
        &mut self,
        operands: GatedDelta<'_, Tensor, Vector, Planes>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let GatedDelta { projected, shape, taps, rate, bias, inputs, planes, plane, layer } = operands;
        let rule = rule(&shape)?;
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = shape;
        let (tokens, all, rows) = (self.step.tokens, self.step.token_rows, self.step.row_count);
        projected.check(all, shape.projected())?;
        let taps = taps.read(shape.taps * shape.channels())?;
        let (rate, bias) = (rate.read(value_heads)?, bias.read(value_heads)?);
        let key_bytes = key_heads * shape.key_conv_bytes();
        let value_bytes = value_heads * shape.value_conv_bytes();
        let memory_bytes = value_heads * shape.memory_bytes();
        let (key_states, key_stride) = planes.states(plane, layer * key_bytes, key_bytes)?;
        let (value_states, value_stride) = planes.states(plane + 1, layer * value_bytes, value_bytes)?;
        let (states, stride) = planes.states(plane + 2, layer * memory_bytes, memory_bytes)?;
        // Padding rows of `inputs` are not cleared, because only the delta rule reads `inputs`, and the delta rule
        // skips padding.
        inputs.written(all, shape.inputs())?;
        out.written(all, shape.values())?;
        out.clear_from(tokens)?;
        let operands = DeltaInputs {
            projected: projected.at(),
            rows: self.step.at.rows,
            row_of: self.step.at.row_of,
            row_count: rows as u32,
            tokens: tokens as u32,
            weights: taps,
            rate,
            bias,
            key_states,
            key_stride,
            value_states,
            value_stride,
            key_heads: key_heads as u32,
            value_heads: value_heads as u32,
            key_dim: key_dim as u32,
            value_dim: value_dim as u32,
            taps: shape.taps as u32,
            out: inputs.at(),
        };
        let blocks = (2 * key_heads + value_heads, tokens.div_ceil(TILE_TOKENS));
        self.kernels.launch(
            kernel::delta_inputs,
            Grid { blocks, threads: THREADS, shared_bytes: 0 },
            operands,
        )?;
        let operands = arguments::DeltaRule {
            inputs: inputs.at(),
            rows: self.step.at.rows,
            row_count: rows as u32,
            tokens: tokens as u32,
            states,
            stride,
            key_heads: key_heads as u32,
            value_heads: value_heads as u32,
            key_dim: key_dim as u32,
            value_dim: value_dim as u32,
            out: out.at(),
        };
        let blocks = (value_heads * value_dim.div_ceil(COLUMNS), rows);
        self.kernels.launch(rule, Grid { blocks, threads: THREADS, shared_bytes: 0 }, operands)
    }

    fn gated_norm(
        &mut self,
        operands: GatedNorm<'_, Tensor, Vector>,
        x: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let GatedNorm { gate, column, norm } = operands;
        let (width, gates, head) = (x.width, gate.width, norm.weight.len());
        if head == 0 || !width.is_multiple_of(head) || column.saturating_add(width) > gates {
            return Err(DeviceError::Misuse(format!(
                "heads of {head} in rows of {width}, with gates from column {column} on of {gates}"
            )));
        }
        if gate.live != x.live {
            return Err(DeviceError::Misuse(format!("{} rows of gates for {} rows", gate.live, x.live)));
        }
        let (rows, heads) = (x.live, width / head);
        let operands = arguments::GatedNorm {
            gate: gate.at().add(column),
            gate_width: gates as u32,
            weight: norm.weight.read(head)?,
            eps: norm.eps,
            rows: rows as u32,
            heads: heads as u32,
            width: head as u32,
            x: x.at(),
        };
        self.kernels.launch(kernel::gated_norm, Grid::of((rows * heads).div_ceil(WARPS), THREADS), operands)
    }
}

/// Returns the kernel of `sources/delta_rule.cu` for these heads. Returns an error if the numbers and sizes of heads
/// are inconsistent, or too large for the kernels.
fn rule(shape: &DeltaShape) -> Result<Kernel<arguments::DeltaRule>, DeviceError> {
    shape.check()?;
    let key_dim = shape.key_dim;
    match key_dim {
        1..=32 => Ok(kernel::delta_rule_32),
        33..=64 => Ok(kernel::delta_rule_64),
        65..=128 => Ok(kernel::delta_rule_128),
        129..=256 => Ok(kernel::delta_rule_256),
        _ => Err(DeviceError::Unsupported(format!("key heads of {key_dim} elements, the limit is 256"))),
    }
}
