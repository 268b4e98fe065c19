//! The gated delta rule, whose states are in slots.

use super::CpuDevice;
use crate::cpu::delta::inputs::{Inputs, MAX_TAPS};
use crate::cpu::delta::memory::{MAX_KEY_DIM, Memories};
use crate::cpu::delta::{self, norm};
use crate::cpu::memory::{Planes, Shared, Tensor, Vector};
use crate::cpu::rowwise::each_row;
use crate::{DeltaRule, DeltaShape, DeviceError, GatedDelta, GatedNorm};

impl DeltaRule for CpuDevice {
    const IMPLEMENTED: bool = true;

    fn delta_rule(
        &mut self,
        operands: GatedDelta<'_, Tensor, Vector, Planes>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let GatedDelta { projected, shape, taps, rate, bias, inputs, planes, plane, layer } = operands;
        check(&shape)?;
        let rows = self.check_rows(projected)?;
        let DeltaShape { key_heads, value_heads, .. } = shape;
        let [keys, values, states] = planes.slots.states([
            (plane, layer, key_heads * shape.key_conv_bytes()),
            (plane + 1, layer, value_heads * shape.value_conv_bytes()),
            (plane + 2, layer, value_heads * shape.memory_bytes()),
        ])?;
        let of_step = Shared::new(self.step.pad(inputs.written(rows, shape.inputs())?, shape.inputs()));
        let inputs = Inputs {
            projected: projected.read(shape.projected())?,
            shape,
            taps: taps.read(shape.taps * shape.channels())?,
            rate: rate.read(value_heads)?,
            bias: bias.read(value_heads)?,
            keys,
            values,
            out: &of_step,
        };
        let out = Shared::new(self.step.pad(out.written(rows, shape.values())?, shape.values()));
        let memories = Memories { inputs: &of_step, shape, states, out };
        delta::delta_rule(self.path, &mut self.pool, &self.step.rows, &inputs, &memories)
    }

    fn gated_norm(
        &mut self,
        operands: GatedNorm<'_, Tensor, Vector>,
        x: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let GatedNorm { gate, column, norm } = operands;
        let (width, gates, eps) = (x.width(), gate.width(), norm.eps);
        let weight = norm.weight.values();
        if weight.is_empty() || !width.is_multiple_of(weight.len()) || column.saturating_add(width) > gates {
            let head = weight.len();
            return Err(DeviceError::Misuse(format!(
                "heads of {head} in rows of {width}, with gates from column {column} on of {gates}"
            )));
        }
        if gate.live() != x.live() {
            return Err(DeviceError::Misuse(format!("{} rows of gates for {} rows", gate.live(), x.live())));
        }
        let (path, gate) = (self.path, gate.values());
        each_row(&mut self.pool, x.values_mut(), width, |row, x| {
            let gate = &gate[row * gates + column..][..width];
            path.run(norm::GatedNorm { x, gate, weight, eps });
        })
    }
}

impl CpuDevice {
    /// Returns the number of tokens of the step, padding included; an error unless `x` has one row per token.
    pub(super) fn check_rows(&self, x: &Tensor) -> Result<usize, DeviceError> {
        match (x.live(), self.step.token_rows()) {
            (rows, tokens) if rows == tokens => Ok(tokens),
            (rows, tokens) => Err(DeviceError::Misuse(format!("{rows} rows of input for {tokens} tokens"))),
        }
    }
}

/// Returns an error if the numbers and sizes of heads are inconsistent, or too large for the kernels.
fn check(shape: &DeltaShape) -> Result<(), DeviceError> {
    shape.check()?;
    let DeltaShape { key_dim, taps, .. } = *shape;
    if key_dim > MAX_KEY_DIM {
        return Err(DeviceError::Unsupported(format!(
            "key heads of {key_dim} elements, the limit is {MAX_KEY_DIM}"
        )));
    }
    if taps > MAX_TAPS {
        return Err(DeviceError::Unsupported(format!(
            "convolutions of {taps} inputs, the limit is {MAX_TAPS}"
        )));
    }
    Ok(())
}
