//! The gated delta rule over slots.

use super::CudaDevice;
use crate::cuda::kernels::{Grid, arguments};
use crate::cuda::planes::Planes;
use crate::cuda::tensor::{Tensor, Vector};
use crate::{DeltaRule, DeltaShape, DeviceError, GatedDelta, GatedNorm};

/// Threads of a block of all kernels here: four warps.
const THREADS: u32 = 128;
const WARPS: usize = 4;
/// Tokens of a block of `sources/delta_inputs.cu`.
const TILE_TOKENS: usize = 16;
/// Columns of a memory in a block of `sources/delta_rule.cu`.
const COLUMNS: usize = 32;

impl DeltaRule for CudaDevice {
    const IMPLEMENTED: bool = true;

    fn delta_rule(
        &mut self,
        operands: GatedDelta<'_, Tensor, Vector, Planes>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let GatedDelta { projected, shape, taps, rate, bias, inputs, planes, plane, layer } = operands;
        let name = kernel(&shape)?;
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = shape;
        let (tokens, all, rows) = (self.step.tokens, self.step.token_rows, self.step.row_count);
        projected.check(all, shape.projected())?;
        let taps = taps.read(shape.taps * shape.channels())?;
        let (rate, bias) = (rate.read(value_heads)?, bias.read(value_heads)?);
        let key_bytes = key_heads * shape.key_conv_bytes();
        let value_bytes = value_heads * shape.value_conv_bytes();
        let memory_bytes = value_heads * shape.memory_bytes();
        let (keys, key_stride) = planes.states(plane, layer * key_bytes, key_bytes)?;
        let (values, value_stride) = planes.states(plane + 1, layer * value_bytes, value_bytes)?;
        let (states, stride) = planes.states(plane + 2, layer * memory_bytes, memory_bytes)?;
        // Padding keeps what it held: only the delta rule reads these inputs, row by row.
        inputs.written(all, shape.inputs())?;
        out.written(all, shape.values())?;
        out.clear_from(tokens)?;
        let operands = arguments![
            projected.at(),
            self.step.at.rows,
            self.step.at.row_of,
            rows as u32,
            tokens as u32,
            taps,
            rate,
            bias,
            keys,
            key_stride,
            values,
            value_stride,
            key_heads as u32,
            value_heads as u32,
            key_dim as u32,
            value_dim as u32,
            shape.taps as u32,
            inputs.at(),
        ];
        let blocks = (2 * key_heads + value_heads, tokens.div_ceil(TILE_TOKENS));
        self.kernels.launch("delta_inputs", Grid { blocks, threads: THREADS, shared_bytes: 0 }, operands)?;
        let operands = arguments![
            inputs.at(),
            self.step.at.rows,
            rows as u32,
            tokens as u32,
            states,
            stride,
            key_heads as u32,
            value_heads as u32,
            key_dim as u32,
            value_dim as u32,
            out.at(),
        ];
        let blocks = (value_heads * value_dim.div_ceil(COLUMNS), rows);
        self.kernels.launch(name, Grid { blocks, threads: THREADS, shared_bytes: 0 }, operands)
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
        let operands = arguments![
            gate.at() + (column * size_of::<f32>()) as u64,
            gates as u32,
            norm.weight.read(head)?,
            norm.eps,
            rows as u32,
            heads as u32,
            head as u32,
            x.at(),
        ];
        self.kernels.launch("gated_norm", Grid::of((rows * heads).div_ceil(WARPS), THREADS), operands)
    }
}

/// Returns the kernel of `sources/delta_rule.cu` for these heads. Refuses heads that do not fit each other, and those
/// that are too large for the kernels.
fn kernel(shape: &DeltaShape) -> Result<&'static str, DeviceError> {
    shape.check()?;
    let key_dim = shape.key_dim;
    match key_dim {
        1..=32 => Ok("delta_rule_32"),
        33..=64 => Ok("delta_rule_64"),
        65..=128 => Ok("delta_rule_128"),
        129..=256 => Ok("delta_rule_256"),
        _ => Err(DeviceError::Unsupported(format!("key heads of {key_dim} elements, the limit is 256"))),
    }
}
