//! Embedding, norms and matrix products with weights.

use std::ops::Range;

use super::CudaDevice;
use crate::cuda::arguments;
use crate::cuda::arguments::{Add, AddBias, Cast, Gated, KeepRows, RmsNorm, SigmoidGate};
use crate::cuda::gemm::{Accumulate, Product};
use crate::cuda::kernels::Grid;
use crate::cuda::memory::{DevicePointer, grown};
use crate::cuda::sources::kernel;
use crate::cuda::tensor::{Matrix, Tensor, Vector};
use crate::{Dense, DeviceError, Embed, GateUp, Linear, Norm, VocabularyShard, WeightType};

/// Threads per block of the elementwise kernels and of the norm.
const THREADS: u32 = 256;
/// Threads per block of the embedding.
const EMBED_THREADS: u32 = 128;

impl Dense for CudaDevice {
    const IMPLEMENTED: bool = true;

    fn embed(&mut self, embed: Embed<'_, Matrix>, out: &mut Tensor) -> Result<(), DeviceError> {
        let Embed { table, shard } = embed;
        let held = table.plain_outputs()?;
        let VocabularyShard { first, .. } = shard.unwrap_or(VocabularyShard { first: 0, vocabulary: held });
        out.written(self.step.token_rows, table.inputs)?;
        if let Some(layout) = table.codes {
            return self.embed_codes(table, layout, VocabularyShard { first, vocabulary: held }, out);
        }
        let kernel = match table.dtype {
            WeightType::F32 => kernel::embed_f32,
            WeightType::Bf16 => kernel::embed_bf16,
            WeightType::F16 => kernel::embed_f16,
        };
        let operands = arguments::Embed {
            table: table.at(),
            ids: self.step.at.ids,
            last_tokens: self.last_tokens.at(),
            first: first as u32,
            held: held as u32,
            width: table.inputs as u32,
            out: out.at(),
        };
        self.kernels.launch(kernel, Grid::of(self.step.token_rows, EMBED_THREADS), operands)
    }

    fn rms_norm(&mut self, x: &Tensor, norm: Norm<'_, Vector>, out: &mut Tensor) -> Result<(), DeviceError> {
        let weight = norm.weight.read(x.width)?;
        out.written_like(x, x.width)?;
        self.norm(x, (weight, norm.eps), WeightType::F32, out.at().cast())
    }

    fn linear(
        &mut self,
        linear: Linear<'_, Tensor, Matrix, Vector>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let Linear { x, norm, weight, bias } = linear;
        let outputs = weight.plain_outputs()?;
        let bias = bias.map(|bias| bias.read(outputs)).transpose()?;
        out.written_like(x, outputs)?;
        self.product(x, norm, weight, Accumulate::Set, out.at())?;
        self.add_bias(bias, out)
    }

    fn linear_add(
        &mut self,
        linear: Linear<'_, Tensor, Matrix, Vector>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let Linear { x, norm, weight, bias } = linear;
        let outputs = weight.plain_outputs()?;
        let bias = bias.map(|bias| bias.read(outputs)).transpose()?;
        out.check(x.live, outputs)?;
        self.product(x, norm, weight, Accumulate::Add, out.at())?;
        self.add_bias(bias, out)
    }

    fn gate_up(
        &mut self,
        gate_up: GateUp<'_, Tensor, Matrix, Vector>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let GateUp { x, norm, weight, limit } = gate_up;
        if limit.is_some() {
            return Err(DeviceError::Unsupported("bounded activations of gate and up".to_owned()));
        }
        let gates = weight.gates()?;
        out.written_like(x, gates)?;
        let bytes = x.capacity * weight.outputs * size_of::<f32>();
        let both = grown(&mut self.scratch.gate_up, &self.gpu, bytes, "gate and up")?.at();
        self.product(x, norm, weight, Accumulate::Set, both)?;
        // The next product usually reads the result, in the weights' type.
        let (kernel, narrow) = match weight.dtype {
            WeightType::F32 => (kernel::gated_f32, DevicePointer::NULL),
            WeightType::Bf16 => (kernel::gated_bf16, self.input_of(out, weight.dtype)?),
            WeightType::F16 => (kernel::gated_f16, self.input_of(out, weight.dtype)?),
        };
        let blocks = (gates.div_ceil(4 * THREADS as usize), out.live);
        let grid = Grid { blocks, threads: THREADS, shared_bytes: 0 };
        self.kernels.launch(
            kernel,
            grid,
            Gated { gate_up: both, width: gates as u32, out: out.at(), narrow },
        )?;
        let writes = self.gpu.writes.so_far();
        self.narrowed = Some(Narrowed { x: out.at().address(), rows: out.live, dtype: weight.dtype, writes });
        Ok(())
    }

    fn sigmoid_gate(&mut self, gate: &Tensor, x: &mut Tensor) -> Result<(), DeviceError> {
        if gate.live != x.live || ![1, x.width].contains(&gate.width) {
            return Err(DeviceError::Misuse(format!(
                "{} rows of {} gates for {} rows of {}",
                gate.live, gate.width, x.live, x.width
            )));
        }
        let elements = x.elements();
        let operands = SigmoidGate {
            gate: gate.at(),
            gates: gate.width as u32,
            width: x.width as u32,
            count: elements as u64,
            x: x.at(),
        };
        self.kernels.launch(kernel::sigmoid_gate, Grid::over(elements, THREADS), operands)
    }

    fn keep_logit_rows(&mut self, x: &mut Tensor) -> Result<(), DeviceError> {
        if x.live != self.step.token_rows {
            let (live, tokens) = (x.live, self.step.token_rows);
            return Err(DeviceError::Misuse(format!(
                "logit rows of {live} rows in a step of {tokens} tokens"
            )));
        }
        let rows = self.step.logit_rows;
        let operands =
            KeepRows { x: x.at(), rows: self.step.at.logit_rows, count: rows as u32, width: x.width as u32 };
        if rows > 0 {
            self.kernels.launch(kernel::keep_rows, Grid::over(x.width, THREADS), operands)?;
        }
        // Padding rows keep their old values.
        (x.live, x.first_logit_row) = (self.step.kept_rows, 0);
        Ok(())
    }

    fn copy_rows(&mut self, x: &Tensor, rows: Range<usize>, out: &mut Tensor) -> Result<(), DeviceError> {
        if rows.start > rows.end || rows.end > x.live {
            return Err(DeviceError::Misuse(format!("rows {rows:?} of a tensor that has {}", x.live)));
        }
        out.written(rows.len(), x.width)?;
        out.first_logit_row = x.first_logit_row + rows.start;
        let row_bytes = x.width * size_of::<f32>();
        out.data.copy_from(0, &x.data, rows.start * row_bytes, rows.len() * row_bytes)
    }
}

/// The tensor whose rows the scratch memory for inputs of products holds, in the type of weights.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Narrowed {
    /// Address of the tensor's rows.
    x: u64,
    rows: usize,
    dtype: WeightType,
    /// The [writes](crate::cuda::context::Writes) so far. A later one may have changed the tensor or the memory.
    writes: u64,
}

impl CudaDevice {
    /// Enqueues the RMS norm of the rows of `x`, and stores the result as `dtype` at `out`.
    fn norm(
        &self,
        x: &Tensor,
        (weight, eps): (DevicePointer<f32>, f32),
        dtype: WeightType,
        out: DevicePointer<u8>,
    ) -> Result<(), DeviceError> {
        let kernel = match dtype {
            WeightType::F32 => kernel::rms_norm_f32,
            WeightType::Bf16 => kernel::rms_norm_bf16,
            WeightType::F16 => kernel::rms_norm_f16,
        };
        let operands = RmsNorm { x: x.at(), weight, eps, width: x.width as u32, out };
        self.kernels.launch(kernel, Grid::of(x.live, THREADS), operands)
    }

    /// Returns scratch memory for `x` in the type of a product's weights.
    fn input_of(&mut self, x: &Tensor, dtype: WeightType) -> Result<DevicePointer<u8>, DeviceError> {
        let bytes = x.capacity * x.width * dtype.bytes();
        Ok(grown(&mut self.scratch.input, &self.gpu, bytes, "the input of a product")?.at())
    }

    /// Enqueues a matrix product of `x`. The rows are first normalised if there is a norm, and then converted to the
    /// matrix's type.
    pub(super) fn product(
        &mut self,
        x: &Tensor,
        norm: Option<Norm<'_, Vector>>,
        matrix: &Matrix,
        accumulate: Accumulate,
        out: DevicePointer<f32>,
    ) -> Result<(), DeviceError> {
        x.check_width(matrix.inputs)?;
        let norm =
            norm.map(|norm| Ok::<_, DeviceError>((norm.weight.read(x.width)?, norm.eps))).transpose()?;
        let elements = x.elements();
        let input = match (norm, matrix.dtype) {
            (None, WeightType::F32) => x.at().cast(),
            (norm, dtype) => {
                let input = self.input_of(x, dtype)?;
                let writes = self.gpu.writes.so_far();
                let narrowed = Narrowed { x: x.at().address(), rows: x.live, dtype, writes };
                match (norm, dtype) {
                    (Some(norm), dtype) => self.norm(x, norm, dtype, input)?,
                    (None, _) if self.narrowed == Some(narrowed) => {}
                    (None, dtype) => {
                        let kernel =
                            if dtype == WeightType::F16 { kernel::cast_f16 } else { kernel::cast_bf16 };
                        let operands = Cast { x: x.at(), count: elements as u64, out: input };
                        self.kernels.launch(kernel, Grid::over(elements, THREADS), operands)?;
                    }
                }
                input
            }
        };
        let product = Product { x: input, rows: x.live, matrix, accumulate, out };
        match matrix.codes {
            Some(layout) => self.codes_product(&product, layout, x.capacity),
            None => self.gemm.product(&product),
        }
    }

    fn add_bias(&self, bias: Option<DevicePointer<f32>>, out: &Tensor) -> Result<(), DeviceError> {
        let (Some(bias), elements) = (bias, out.elements()) else { return Ok(()) };
        let operands = AddBias { bias, width: out.width as u32, count: elements as u64, out: out.at() };
        self.kernels.launch(kernel::add_bias, Grid::over(elements, THREADS), operands)
    }

    /// Enqueues `out += x`.
    pub(super) fn add(&self, x: &Tensor, out: &Tensor) -> Result<(), DeviceError> {
        let elements = x.elements();
        let operands = Add { x: x.at(), count: elements as u64, out: out.at() };
        self.kernels.launch(kernel::add, Grid::over(elements, THREADS), operands)
    }
}
