//! A device that passes each operation to an observer. The observer runs the operation. Benches and tests use this
//! device.

use std::time::Instant;

use crate::{
    AttentionShape, DeltaShape, Device, DeviceError, DeviceLimits, HostMatrix, KvShape, PageId, PlanesShape,
    Quantize, QuantizedRows, SlotId, StepInputs, StepResults, collective::GroupRank,
};

/// One call of an operation of a family, or of [`Device::begin_step`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Operation {
    /// Name of the method.
    pub name: &'static str,
    /// Number of rows that the operation computes.
    pub rows: usize,
    /// Number of outputs and number of inputs of the operation's weight matrix; `None` without one.
    pub matrix: Option<[usize; 2]>,
    /// Floating-point operations of products with weights: one multiplication and one addition per element of the
    /// matrix and row.
    pub product_operations: f64,
    /// Other floating-point operations that grow faster than the tensors: q·k and the weighted sums of values.
    pub flops: f64,
    /// Bytes of weights, keys and values that the operation reads.
    pub bytes: f64,
}

/// An observer of operations.
pub trait Observer: Send + 'static {
    /// Observes one operation. `run` performs it. An observer may time it, or return an error without calling `run`.
    fn observe<T>(
        &mut self,
        operation: &Operation,
        run: impl FnOnce() -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError>;
}

/// The number of tokens and the first position of one row of a step.
type RowExtent = (usize, usize);

/// A device that shows all of its operations to an observer. The macro that declares a family implements the family for
/// recorders, so a recorder has the families of the device that it wraps.
pub struct Recorder<D, O> {
    device: D,
    observer: O,
    /// The rows of the last step.
    rows: Vec<RowExtent>,
    /// Number of tokens of the last step, padding included.
    padded_tokens: usize,
    /// The plane of keys and values that was allocated last.
    kv: Option<KvShape>,
}

impl<D: Device, O: Observer> Recorder<D, O> {
    /// Wraps `device`.
    pub fn new(device: D, observer: O) -> Self {
        Self { device, observer, rows: Vec::new(), padded_tokens: 0, kv: None }
    }

    /// Returns the observer, so that the caller can read what it has recorded.
    pub fn observer(&mut self) -> &mut O {
        &mut self.observer
    }

    /// Lets the observer run an operation.
    pub(crate) fn observe<T>(
        &mut self,
        operation: &Operation,
        run: impl FnOnce(&mut D) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let device = &mut self.device;
        self.observer.observe(operation, || run(device))
    }

    /// Returns the record of an operation on all tokens of the step and its padding.
    pub(crate) fn by_token(&self) -> Operation {
        Operation { rows: self.padded_tokens, ..Operation::default() }
    }

    /// Returns the record of an operation on the rows of a tensor.
    pub(crate) fn by_row(&self, x: &D::Tensor) -> Operation {
        Operation { rows: self.device.tensor_shape(x)[0], ..Operation::default() }
    }

    /// Number of bytes of a weight matrix that a matrix product reads.
    fn elements_bytes(&self, matrix: &D::Matrix) -> u64 {
        let device = &self.device;
        device.matrix_bytes(matrix) - device.screen_bytes(matrix) - device.corrections_bytes(matrix)
    }

    /// Returns the record of a matrix product.
    pub(crate) fn product(&self, x: &D::Tensor, weight: &D::Matrix) -> Operation {
        let [rows, _] = self.device.tensor_shape(x);
        let [outputs, inputs] = self.device.matrix_shape(weight);
        Operation {
            rows,
            matrix: Some([outputs, inputs]),
            product_operations: 2.0 * (rows * outputs * inputs) as f64,
            bytes: self.elements_bytes(weight) as f64,
            ..Operation::default()
        }
    }

    /// Returns the record of the products of all rows with each of these matrices.
    pub(crate) fn products(&self, x: &D::Tensor, weights: &[D::Matrix]) -> Operation {
        let each = weights.iter().map(|weight| self.product(x, weight));
        each.fold(self.by_row(x), |all, one| Operation {
            product_operations: all.product_operations + one.product_operations,
            bytes: all.bytes + one.bytes,
            ..all
        })
    }

    /// Returns the record of a mixture of experts. Assumes that the tokens are spread over as many experts as possible.
    pub(crate) fn experts(
        &self,
        x: &D::Tensor,
        top_k: usize,
        gate_up: &[D::Matrix],
        down: &[D::Matrix],
    ) -> Operation {
        let by_row = self.by_row(x);
        let read =
            gate_up.iter().chain(down).map(|matrix| self.device.matrix_bytes(matrix) as f64).sum::<f64>();
        let elements = |matrices: &[D::Matrix]| {
            matrices.first().map_or(0, |matrix| self.device.matrix_shape(matrix).iter().product())
        };
        let hit = (by_row.rows * top_k).min(gate_up.len()) as f64 / gate_up.len().max(1) as f64;
        Operation {
            product_operations: 2.0 * (by_row.rows * top_k * (elements(gate_up) + elements(down))) as f64,
            bytes: read * hit,
            ..by_row
        }
    }

    /// Returns the record of a delta rule over the step's tokens. Counts seven operations per token and element of a
    /// state matrix `S`: one for the decay, and two each for `Sᵀk`, the update and `Sᵀq`. Every row reads and writes
    /// its state matrices once.
    pub(crate) fn delta_rule(&self, shape: &DeltaShape) -> Operation {
        let memory_bytes = (shape.value_heads * shape.memory_bytes()) as f64;
        let by_token = self.by_token();
        let tokens: usize = self.rows.iter().map(|(tokens, _)| tokens).sum();
        Operation {
            flops: 7.0 * tokens as f64 * memory_bytes / size_of::<f32>() as f64,
            bytes: 2.0 * self.rows.len() as f64 * memory_bytes,
            ..by_token
        }
    }

    /// Returns the record of causal attention of the step's tokens. Every key is counted once per row of the step.
    pub(crate) fn attention(&self, shape: &AttentionShape) -> Operation {
        let (mut pairs, mut keys) = (0, 0);
        for &(tokens, start) in &self.rows {
            let seen = |position: usize| (position + 1).min(shape.window.unwrap_or(usize::MAX));
            pairs += (start..start + tokens).map(seen).sum::<usize>();
            keys += (start + tokens).min(shape.window.map_or(usize::MAX, |window| window + tokens));
        }
        let dtype_bytes = self.kv.map_or(0, |kv| kv.dtype.bytes());
        Operation {
            flops: 4.0 * (pairs * shape.heads * shape.head_dim) as f64,
            bytes: (2 * keys * shape.kv_heads * shape.head_dim * dtype_bytes) as f64,
            ..self.by_token()
        }
    }
}

impl<D: Device, O: Observer> Device for Recorder<D, O> {
    type Matrix = D::Matrix;
    type Vector = D::Vector;
    type Tensor = D::Tensor;
    type Planes = D::Planes;
    type Done = D::Done;

    fn describe(&self) -> String {
        self.device.describe()
    }

    fn limits(&self) -> DeviceLimits {
        self.device.limits()
    }

    fn free_bytes(&self) -> Option<u64> {
        self.device.free_bytes()
    }

    fn group_rank(&self) -> GroupRank {
        self.device.group_rank()
    }

    fn matrix(&mut self, matrices: &[HostMatrix<'_>], quantize: Quantize) -> Result<D::Matrix, DeviceError> {
        self.device.matrix(matrices, quantize)
    }

    fn head_matrix(
        &mut self,
        matrices: &[HostMatrix<'_>],
        quantize: Quantize,
    ) -> Result<D::Matrix, DeviceError> {
        self.device.head_matrix(matrices, quantize)
    }

    fn table_matrix(
        &mut self,
        matrices: &[HostMatrix<'_>],
        quantize: Quantize,
    ) -> Result<D::Matrix, DeviceError> {
        self.device.table_matrix(matrices, quantize)
    }

    fn tied_matrix(
        &mut self,
        matrices: &[HostMatrix<'_>],
        quantize: Quantize,
    ) -> Result<D::Matrix, DeviceError> {
        self.device.tied_matrix(matrices, quantize)
    }

    fn gate_up_matrix(
        &mut self,
        gate_up: [HostMatrix<'_>; 2],
        quantize: Quantize,
    ) -> Result<D::Matrix, DeviceError> {
        self.device.gate_up_matrix(gate_up, quantize)
    }

    fn holds_quantized(&self) -> bool {
        self.device.holds_quantized()
    }

    fn quantized_matrix(&mut self, matrices: &[QuantizedRows<'_>]) -> Result<D::Matrix, DeviceError> {
        self.device.quantized_matrix(matrices)
    }

    fn quantized_gate_up(&mut self, gate_up: [QuantizedRows<'_>; 2]) -> Result<D::Matrix, DeviceError> {
        self.device.quantized_gate_up(gate_up)
    }

    fn reads_weights(&self) -> bool {
        self.device.reads_weights()
    }

    fn host_tasks(&mut self, tasks: usize, task: &(dyn Fn(usize) + Sync)) -> Result<(), DeviceError> {
        self.device.host_tasks(tasks, task)
    }

    fn matrix_bytes(&self, matrix: &D::Matrix) -> u64 {
        self.device.matrix_bytes(matrix)
    }

    fn screen_bytes(&self, matrix: &D::Matrix) -> u64 {
        self.device.screen_bytes(matrix)
    }

    fn corrections_bytes(&self, matrix: &D::Matrix) -> u64 {
        self.device.corrections_bytes(matrix)
    }

    fn matrix_shape(&self, matrix: &D::Matrix) -> [usize; 2] {
        self.device.matrix_shape(matrix)
    }

    fn vector(&mut self, values: &[f32]) -> Result<D::Vector, DeviceError> {
        self.device.vector(values)
    }

    fn tensor(&mut self, rows: usize, width: usize) -> Result<D::Tensor, DeviceError> {
        self.device.tensor(rows, width)
    }

    fn tensor_shape(&self, tensor: &D::Tensor) -> [usize; 2] {
        self.device.tensor_shape(tensor)
    }

    fn step_bytes(&self) -> u64 {
        self.device.step_bytes()
    }

    fn upload(&mut self, values: &[f32], out: &mut D::Tensor) -> Result<(), DeviceError> {
        self.device.upload(values, out)
    }

    fn overwrite_rows(
        &mut self,
        out: &mut D::Tensor,
        first: usize,
        values: &[f32],
    ) -> Result<(), DeviceError> {
        self.device.overwrite_rows(out, first, values)
    }

    fn download(&mut self, x: &D::Tensor, out: &mut Vec<f32>) -> Result<(), DeviceError> {
        self.device.download(x, out)
    }

    fn planes(&mut self, shape: &PlanesShape) -> Result<D::Planes, DeviceError> {
        self.kv = shape.kv;
        self.device.planes(shape)
    }

    fn kv_format(&self) -> &'static str {
        self.device.kv_format()
    }

    fn read_pages(
        &mut self,
        planes: &D::Planes,
        pages: &[PageId],
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        self.device.read_pages(planes, pages, out)
    }

    fn write_pages(
        &mut self,
        planes: &mut D::Planes,
        pages: &[PageId],
        data: &[u8],
    ) -> Result<(), DeviceError> {
        self.device.write_pages(planes, pages, data)
    }

    fn read_slot(&mut self, planes: &D::Planes, slot: SlotId, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.device.read_slot(planes, slot, out)
    }

    fn write_slot(&mut self, planes: &mut D::Planes, slot: SlotId, data: &[u8]) -> Result<(), DeviceError> {
        self.device.write_slot(planes, slot, data)
    }

    fn begin_step(&mut self, inputs: &StepInputs<'_>, planes: &mut D::Planes) -> Result<(), DeviceError> {
        self.rows.clear();
        self.rows.extend(inputs.rows.iter().map(|row| (row.tokens, row.start)));
        self.padded_tokens = inputs.padded_tokens();
        let operation = Operation { name: "begin_step", ..self.by_token() };
        self.observe(&operation, |device| device.begin_step(inputs, planes))
    }

    fn end_step(&mut self) -> Result<D::Done, DeviceError> {
        self.device.end_step()
    }

    fn collect(
        &mut self,
        done: &mut D::Done,
        until: Option<Instant>,
        out: &mut StepResults,
    ) -> Result<bool, DeviceError> {
        self.device.collect(done, until, out)
    }
}
