//! The gated delta rule over slots.

use super::CudaDevice;
use crate::cuda::kernels::{Grid, arguments};
use crate::cuda::planes::Planes;
use crate::cuda::tensor::{Tensor, Vector};
use crate::{DeltaInputs, DeltaMemory, DeltaRule, DeltaShape, DeviceError, GatedNorm};

/// Threads of a block of all kernels here: four warps.
const THREADS: u32 = 128;
const WARPS: usize = 4;
/// Tokens of a block of `sources/delta_inputs.cu`.
const TILE_TOKENS: usize = 16;
/// Columns of a memory in a block of `sources/delta_rule.cu`.
const COLUMNS: usize = 32;

impl DeltaRule for CudaDevice {
    const IMPLEMENTED: bool = true;

    fn delta_inputs(
        &mut self,
        operands: DeltaInputs<'_, Tensor, Vector, Planes>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let DeltaInputs { projected, shape, taps, rate, bias, planes, plane, layer } = operands;
        kernel(&shape)?;
        let DeltaShape { key_heads, value_heads, .. } = shape;
        let (tokens, all) = (self.step.tokens, self.step.token_rows);
        projected.check(all, shape.projected())?;
        let taps = taps.read(shape.taps * shape.channels())?;
        let (rate, bias) = (rate.read(value_heads)?, bias.read(value_heads)?);
        let key_bytes = key_heads * shape.key_conv_bytes();
        let value_bytes = value_heads * shape.value_conv_bytes();
        let (keys, key_stride) = planes.states(plane, layer * key_bytes, key_bytes)?;
        let (values, value_stride) = planes.states(plane + 1, layer * value_bytes, value_bytes)?;
        // Padding keeps what it held: only the delta rule reads these inputs, row by row.
        out.written(all, shape.inputs())?;
        let operands = arguments![
            projected.at(),
            self.step.at.rows,
            self.step.at.row_of,
            self.step.row_count as u32,
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
            shape.key_dim as u32,
            shape.value_dim as u32,
            shape.taps as u32,
            out.at(),
        ];
        let blocks = (2 * key_heads + value_heads, tokens.div_ceil(TILE_TOKENS));
        self.kernels.launch("delta_inputs", Grid { blocks, threads: THREADS, shared_bytes: 0 }, operands)
    }

    fn delta_rule(
        &mut self,
        operands: DeltaMemory<'_, Tensor, Planes>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let DeltaMemory { inputs, shape, planes, plane, layer } = operands;
        let name = kernel(&shape)?;
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = shape;
        let (tokens, all, rows) = (self.step.tokens, self.step.token_rows, self.step.row_count);
        inputs.check(all, shape.inputs())?;
        let bytes = value_heads * shape.memory_bytes();
        let (states, stride) = planes.states(plane + 2, layer * bytes, bytes)?;
        out.written(all, shape.values())?;
        out.clear_from(tokens)?;
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

/// Returns the kernel of `sources/delta_rule.cu` for these heads. Refuses heads that do not fit each other, and those that
/// are too large for the kernels.
fn kernel(shape: &DeltaShape) -> Result<&'static str, DeviceError> {
    let DeltaShape { key_heads, value_heads, key_dim, value_dim, taps } = *shape;
    if [key_heads, value_heads, key_dim, value_dim, taps].contains(&0)
        || !value_heads.is_multiple_of(key_heads)
    {
        return Err(DeviceError::Misuse(format!("a delta rule of {shape:?}")));
    }
    match key_dim {
        1..=32 => Ok("delta_rule_32"),
        33..=64 => Ok("delta_rule_64"),
        65..=128 => Ok("delta_rule_128"),
        129..=256 => Ok("delta_rule_256"),
        _ => Err(DeviceError::Unsupported(format!("key heads of {key_dim} elements, the limit is 256"))),
    }
}
