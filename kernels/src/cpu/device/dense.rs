//! Embedding, norms and matrix products: dispatch to the kernels for the form of the weights.

use std::ops::Range;

use super::CpuDevice;
use crate::cpu::gemm::groups::Group;
use crate::cpu::gemm::input::Input;
use crate::cpu::gemm::{self, Epilogue, Product};
use crate::cpu::memory::{Tensor, Vector, Weights};
use crate::cpu::quant::{grouped, int8};
use crate::cpu::rowwise;
use crate::cpu::step::PADDING;
use crate::{
    Dense, DeviceError, Embed, GateUp, GroupedBuffers, GroupedLinear, Linear, Norm, VocabularyShard,
};

impl Dense for CpuDevice {
    const IMPLEMENTED: bool = true;

    fn embed(&mut self, embed: Embed<'_, Weights>, out: &mut Tensor) -> Result<(), DeviceError> {
        let Embed { table, shard } = embed;
        let VocabularyShard { first, vocabulary } =
            shard.unwrap_or(VocabularyShard { first: 0, vocabulary: table.outputs() });
        let width = table.inputs();
        let out = self.step.pad(out.written(self.step.token_rows(), width)?, width);
        rowwise::embed(self.path, &mut self.pool, table, first, vocabulary, &self.step.token_ids, out)
    }

    fn rms_norm(&mut self, x: &Tensor, norm: Norm<'_, Vector>, out: &mut Tensor) -> Result<(), DeviceError> {
        let weight = norm.weight.read(x.width())?;
        let out = out.written(x.live(), x.width())?;
        rowwise::rms_norm(self.path, &mut self.pool, x.values(), weight, norm.eps, out)
    }

    fn linear(
        &mut self,
        linear: Linear<'_, Tensor, Weights, Vector>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let Linear { x, norm, weight, bias } = linear;
        let outputs = weight.plain_outputs()?;
        let bias = bias.map(|bias| bias.read(outputs)).transpose()?;
        let out = out.written(x.live(), outputs)?;
        self.product(x, norm, weight, Epilogue::Set(bias), out)
    }

    fn linear_add(
        &mut self,
        linear: Linear<'_, Tensor, Weights, Vector>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let Linear { x, norm, weight, bias } = linear;
        let outputs = weight.plain_outputs()?;
        let bias = bias.map(|bias| bias.read(outputs)).transpose()?;
        let out = out.change(x.live(), outputs)?;
        self.product(x, norm, weight, Epilogue::Add(bias), out)
    }

    fn gate_up(
        &mut self,
        gate_up: GateUp<'_, Tensor, Weights, Vector>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let GateUp { x, norm, weight, limit } = gate_up;
        let out = out.written(x.live(), weight.gates()?)?;
        self.product(x, norm, weight, Epilogue::Gated(limit), out)
    }

    fn grouped_linear(
        &mut self,
        linear: GroupedLinear<'_, Tensor, Weights>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let GroupedLinear { x, weights, buffers: GroupedBuffers { inputs, outputs } } = linear;
        let Some(first) = weights.first() else {
            return Err(DeviceError::Misuse("a product without groups".to_owned()));
        };
        let (rows, count, width) = (x.live(), weights.len(), first.inputs());
        let height = first.plain_outputs()?;
        let x = x.read(count * width)?;
        let out = out.written(rows, count * height)?;
        if rows == 0 {
            return Ok(());
        }
        let columns = inputs.written(count * rows, width)?;
        rowwise::each_row(&mut self.pool, columns, width, |index, to| {
            let (group, row) = (index / rows, index % rows);
            to.copy_from_slice(&x[row * count * width + group * width..][..width]);
        })?;
        // The groups are taken out of the device, because the product needs `&mut self` meanwhile.
        let mut groups = std::mem::take(&mut self.groups);
        groups.clear();
        groups.extend(
            (0..count).map(|group| Group { matrix: group, rows: (group * rows, (group + 1) * rows) }),
        );
        let products = outputs.written(count * rows, height)?;
        self.grouped_product(inputs, None, (weights, &groups), Epilogue::Set(None), products)?;
        self.groups = groups;
        let products = outputs.read(height)?;
        rowwise::each_row(&mut self.pool, out, count * height, |row, to| {
            for (group, to) in to.chunks_exact_mut(height).enumerate() {
                to.copy_from_slice(&products[(group * rows + row) * height..][..height]);
            }
        })
    }

    fn sigmoid_gate(&mut self, gate: &Tensor, x: &mut Tensor) -> Result<(), DeviceError> {
        let (width, gates) = (x.width(), gate.width());
        if gates != width && gates != 1 {
            return Err(DeviceError::Misuse(format!("{gates} gates per row of {width}")));
        }
        let x = x.change(gate.live(), width)?;
        rowwise::sigmoid_gate(self.path, &mut self.pool, (gate.values(), gates), width, x)
    }

    fn keep_logit_rows(&mut self, x: &mut Tensor) -> Result<(), DeviceError> {
        x.keep(&self.step.logit_rows, self.step.kept_rows())?;
        let width = x.width();
        x.values_mut()[self.step.logit_rows.len() * width..].fill(PADDING);
        Ok(())
    }

    fn copy_rows(&mut self, x: &Tensor, rows: Range<usize>, out: &mut Tensor) -> Result<(), DeviceError> {
        let width = x.width();
        let Some(values) = x.values().get(rows.start * width..rows.end * width) else {
            return Err(DeviceError::Misuse(format!("rows {rows:?} of a tensor that has {}", x.live())));
        };
        out.written(rows.len(), width)?.copy_from_slice(values);
        Ok(())
    }
}

/// Returns the rows of `x` as the input of a matrix product; an error unless each row has `inputs` elements.
pub(super) fn input<'a>(
    x: &'a Tensor,
    norm: Option<&Norm<'a, Vector>>,
    inputs: usize,
) -> Result<Input<'a>, DeviceError> {
    let norm = norm.map(|norm| Ok::<_, DeviceError>((norm.weight.read(inputs)?, norm.eps)));
    Ok(Input { norm: norm.transpose()?, values: x.read(inputs)? })
}

impl CpuDevice {
    /// Computes a matrix product of `x`, which is normalised first if there is a norm.
    pub(super) fn product(
        &mut self,
        x: &Tensor,
        norm: Option<Norm<'_, Vector>>,
        weight: &Weights,
        epilogue: Epilogue<'_>,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        self.grouped_product(
            x,
            norm,
            (std::slice::from_ref(weight), &[Group::whole(x.live())]),
            epilogue,
            out,
        )
    }

    /// Computes, for each group, the product of the group's rows of `x` and the group's matrix. If there is a norm, the
    /// rows are normalised first.
    pub(super) fn grouped_product(
        &mut self,
        x: &Tensor,
        norm: Option<Norm<'_, Vector>>,
        (matrices, groups): (&[Weights], &[Group]),
        epilogue: Epilogue<'_>,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        let Some(weight) = groups.first().map(|group| &matrices[group.matrix]) else { return Ok(()) };
        if !groups.iter().all(|group| matrices[group.matrix].is_like(weight)) {
            return Err(DeviceError::Misuse("matrices of several kinds in one product".to_owned()));
        }
        // Tasks of two groups must not write to the same rows.
        if groups.windows(2).any(|pair| pair[0].rows.1 > pair[1].rows.0) {
            return Err(DeviceError::Misuse("two matrices for one row of a product".to_owned()));
        }
        let x = input(x, norm.as_ref(), weight.inputs())?;
        let (path, pool) = (self.path, &mut self.pool);
        let product = Product { x, groups, matrices, epilogue, out };
        match weight {
            Weights::Stored(_) => gemm::linear(path, pool, &mut self.products, product),
            Weights::Int8(_) => int8::linear(path, pool, &mut self.quantised, product),
            Weights::Grouped(_) => {
                grouped::linear(path, pool, &mut self.quantised, self.activations, product)
            }
        }
    }
}
