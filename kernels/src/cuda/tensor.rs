//! Activations, weight vectors and weight matrices on the GPU.

mod codes;

use std::sync::Arc;

pub(super) use self::codes::CodesLayout;

use super::context::{Event, Gpu};
use super::memory::{DeviceBuffer, DevicePointer, PinnedBuffer};
use crate::{DeviceError, HostMatrix, WeightType};

/// Activations, `[rows, width]` in f32. The first `live` rows hold values once the stream has passed the
/// operation that writes them.
pub struct Tensor {
    /// Maximum number of rows.
    pub(super) capacity: usize,
    pub(super) width: usize,
    /// Number of rows that the last operation wrote or kept.
    pub(super) live: usize,
    /// For a tensor of logit rows: index of its first row among the step's logit rows.
    pub(super) first_logit_row: usize,
    pub(super) data: DeviceBuffer,
}

impl Tensor {
    pub(super) fn new(gpu: &Arc<Gpu>, capacity: usize, width: usize) -> Result<Self, DeviceError> {
        let bytes = capacity.checked_mul(width).and_then(|elements| elements.checked_mul(size_of::<f32>()));
        let data = DeviceBuffer::new(gpu, bytes, "an activation buffer")?;
        Ok(Self { capacity, width, live: 0, first_logit_row: 0, data })
    }

    /// Address of the first row.
    pub(super) fn at(&self) -> DevicePointer<f32> {
        self.data.at()
    }

    /// Number of live elements.
    pub(super) fn elements(&self) -> usize {
        self.live * self.width
    }

    pub(super) fn check_width(&self, width: usize) -> Result<(), DeviceError> {
        if self.width == width {
            return Ok(());
        }
        Err(DeviceError::Misuse(format!("a tensor {} wide where {width} is wanted", self.width)))
    }

    /// Checks that the tensor has `rows` live rows of `width`.
    pub(super) fn check(&self, rows: usize, width: usize) -> Result<(), DeviceError> {
        self.check_width(width)?;
        if self.live == rows {
            return Ok(());
        }
        Err(DeviceError::Misuse(format!("{} live rows where {rows} are wanted", self.live)))
    }

    /// Makes the first `rows` rows live. The caller writes them.
    pub(super) fn written(&mut self, rows: usize, width: usize) -> Result<(), DeviceError> {
        self.check_width(width)?;
        if rows > self.capacity {
            let capacity = self.capacity;
            return Err(DeviceError::Misuse(format!("{rows} rows into a tensor with room for {capacity}")));
        }
        (self.live, self.first_logit_row) = (rows, 0);
        Ok(())
    }

    /// Enqueues the clearing of the live rows from index `row` on.
    pub(super) fn clear_from(&self, row: usize) -> Result<(), DeviceError> {
        let row_bytes = self.width * size_of::<f32>();
        match self.live.saturating_sub(row) {
            0 => Ok(()),
            rows => self.data.fill_zeros(row * row_bytes, rows * row_bytes),
        }
    }

    /// Makes as many rows live as `x` has. The rows are the same logit rows as those of `x`.
    pub(super) fn written_like(&mut self, x: &Self, width: usize) -> Result<(), DeviceError> {
        self.written(x.live, width)?;
        self.first_logit_row = x.first_logit_row;
        Ok(())
    }
}

/// A norm's weight or a bias, in f32.
pub struct Vector {
    len: usize,
    data: DeviceBuffer,
}

impl Vector {
    pub(super) fn load(
        gpu: &Arc<Gpu>,
        loader: &mut WeightLoader,
        values: &[f32],
    ) -> Result<Self, DeviceError> {
        let data = DeviceBuffer::new(gpu, size_of_val(values), "a weight vector")?;
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        loader.load(&data, 0, [&bytes[..]].into_iter())?;
        Ok(Self { len: values.len(), data })
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Address of the elements; an error unless there are `len`.
    pub(super) fn read(&self, len: usize) -> Result<DevicePointer<f32>, DeviceError> {
        if self.len == len {
            return Ok(self.data.at());
        }
        Err(DeviceError::Misuse(format!("a vector of {} where {len} are wanted", self.len)))
    }
}

/// A weight matrix as in the checkpoint, `[outputs, inputs]`. Fused matrices are stored one after another; in a pair,
/// gate comes before up.
pub struct Matrix {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) is_pair: bool,
    /// Type of the inputs of products.
    pub(super) dtype: WeightType,
    /// The layout of weights that are codes; `None` if they have the type `dtype`.
    pub(super) codes: Option<CodesLayout>,
    data: DeviceBuffer,
}

impl Matrix {
    /// Address of the weights or codes.
    pub(super) fn at(&self) -> DevicePointer<u8> {
        self.data.at()
    }

    pub(super) fn bytes(&self) -> usize {
        self.data.bytes()
    }

    /// Number of outputs of a matrix; an error for a pair.
    pub(super) fn plain_outputs(&self) -> Result<usize, DeviceError> {
        if self.is_pair {
            return Err(DeviceError::Misuse("gate and up, where a plain matrix is wanted".to_owned()));
        }
        Ok(self.outputs)
    }

    /// Number of gates of a pair; an error for any other matrix.
    pub(super) fn gates(&self) -> Result<usize, DeviceError> {
        if !self.is_pair {
            return Err(DeviceError::Misuse("a plain matrix, where gate and up are wanted".to_owned()));
        }
        Ok(self.outputs / 2)
    }

    /// Loads matrices one after another.
    pub(super) fn load(
        gpu: &Arc<Gpu>,
        loader: &mut WeightLoader,
        matrices: &[HostMatrix<'_>],
        is_pair: bool,
    ) -> Result<Self, DeviceError> {
        let first =
            matrices.first().ok_or_else(|| DeviceError::Misuse("no matrices to fuse into one".to_owned()))?;
        let (inputs, dtype) = (first.columns, first.dtype);
        for matrix in matrices {
            let HostMatrix { rows, columns, stride, .. } = *matrix;
            let fits = stride >= columns && matrix.extent() == Some(matrix.bytes.len());
            if columns != inputs || matrix.dtype != dtype || !fits {
                return Err(DeviceError::Misuse(format!(
                    "a matrix of {rows} x {columns} {:?}, row stride {stride}, in {} bytes among matrices of {inputs} \
                     columns of {dtype:?}",
                    matrix.dtype,
                    matrix.bytes.len()
                )));
            }
        }
        let outputs = matrices.iter().map(|matrix| matrix.rows).sum::<usize>();
        if is_pair && !(matrices.len() == 2 && 2 * first.rows == outputs) {
            let rows: Vec<usize> = matrices.iter().map(|matrix| matrix.rows).collect();
            return Err(DeviceError::Misuse(format!("gate and up as matrices of {rows:?} rows")));
        }
        let row_bytes = inputs * dtype.bytes();
        let data = DeviceBuffer::new(gpu, outputs.checked_mul(row_bytes), "a weight matrix")?;
        let rows = matrices.iter().flat_map(|matrix| (0..matrix.rows).map(move |row| matrix.row(row)));
        loader.load(&data, 0, rows)?;
        Ok(Self { outputs, inputs, is_pair, dtype, codes: None, data })
    }
}

/// Size in bytes of each of the loader's two buffers.
const CHUNK: usize = 8 << 20;

/// Copies weights to the GPU through two pinned buffers, so that one is filled while the other is copied.
pub(super) struct WeightLoader {
    gpu: Arc<Gpu>,
    buffers: Vec<(PinnedBuffer, Option<Event>)>,
    next: usize,
}

impl WeightLoader {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Self {
        Self { gpu: gpu.clone(), buffers: Vec::new(), next: 0 }
    }

    /// Copies `pieces`, end to end, to `to`, from its byte `start` on.
    pub(super) fn load<'a>(
        &mut self,
        to: &DeviceBuffer,
        start: usize,
        pieces: impl Iterator<Item = &'a [u8]>,
    ) -> Result<(), DeviceError> {
        self.gpu.bind()?;
        while self.buffers.len() < 2 {
            self.buffers.push((PinnedBuffer::new(&self.gpu, CHUNK)?, None));
        }
        let (mut copied, mut filled) = (start, 0);
        for mut piece in pieces {
            while !piece.is_empty() {
                if filled == 0 {
                    self.wait()?;
                }
                let (buffer, _) = &mut self.buffers[self.next];
                let (part, rest) = piece.split_at(piece.len().min(CHUNK - filled));
                buffer.bytes_mut()[filled..filled + part.len()].copy_from_slice(part);
                (piece, filled) = (rest, filled + part.len());
                if filled == CHUNK {
                    self.send(to, copied, filled)?;
                    (copied, filled) = (copied + filled, 0);
                }
            }
        }
        self.send(to, copied, filled)
    }

    /// Waits until the last copy from the next buffer is done.
    fn wait(&mut self) -> Result<(), DeviceError> {
        match self.buffers[self.next].1.take() {
            Some(event) => event.wait().map_err(|error| self.gpu.lost("loading weights", error)),
            None => Ok(()),
        }
    }

    fn send(&mut self, to: &DeviceBuffer, start: usize, bytes: usize) -> Result<(), DeviceError> {
        if bytes > 0 {
            let (buffer, event) = &mut self.buffers[self.next];
            to.copy_in(start, buffer, bytes)?;
            *event = Some(Event::record(&self.gpu)?);
            self.next = 1 - self.next;
        }
        Ok(())
    }
}
