//! A weight matrix in any of the device's packed forms.

use std::fs::File;

use crate::cpu::memory::fused_matrices::{FusedMatrices, Shape};
use crate::cpu::memory::matrix::{Form, Matrix};
use crate::cpu::quant::grouped::{GroupLayout, GroupedMatrix};
use crate::cpu::quant::int8::Int8Matrix;
use crate::cpu::simd::isa::Path;
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeviceError, Quantize};

/// The storage of a weight matrix's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) enum Packing {
    /// Not quantised.
    Plain(Form),
    /// Quantised to int8.
    Int8,
    /// Quantised in groups: to four bits, or by the checkpoint.
    Grouped(GroupLayout),
}

impl Packing {
    /// Returns the packing of a matrix: quantised if `quantize` demands it, otherwise `form`.
    pub(in crate::cpu) fn new(quantize: Quantize, form: Form) -> Self {
        match quantize {
            Quantize::None => Self::Plain(form),
            Quantize::Int8 => Self::Int8,
            Quantize::Int4 => Self::Grouped(GroupLayout::INT4),
        }
    }
}

/// A weight matrix, `y = x · Wᵀ`.
pub enum Weights {
    /// A matrix in the checkpoint's type or in block floating point.
    Stored(Matrix),
    /// A matrix in eight bits.
    Int8(Int8Matrix),
    /// A matrix in four or eight bits with scales of groups.
    Grouped(GroupedMatrix),
}

impl Weights {
    /// Packs `source`, whose weights are quantised if the packing demands it.
    pub(in crate::cpu) fn pack(
        path: Path,
        pool: &mut ThreadPool,
        source: FusedMatrices<'_>,
        packing: Packing,
    ) -> Result<Self, DeviceError> {
        Ok(match packing {
            Packing::Plain(form) => Self::Stored(Matrix::pack(form, pool, source)?),
            Packing::Int8 => Self::Int8(Int8Matrix::pack(path, pool, source)?),
            Packing::Grouped(_) => Self::Grouped(GroupedMatrix::quantise(path, pool, source)?),
        })
    }

    /// Size in bytes of a packed matrix; `None` if it overflows.
    pub(in crate::cpu) fn len_packed(shape: Shape, packing: Packing) -> Option<usize> {
        match packing {
            Packing::Plain(form) => Matrix::len(shape, form),
            Packing::Int8 => Int8Matrix::len(shape),
            Packing::Grouped(layout) => GroupedMatrix::len(shape, layout),
        }
    }

    /// Maps a packed matrix: the [`Self::len_packed`] bytes of `file` from `from` on.
    pub(in crate::cpu) fn mapped(
        file: &File,
        from: u64,
        shape: Shape,
        packing: Packing,
    ) -> Result<Self, DeviceError> {
        Ok(match packing {
            Packing::Plain(form) => Self::Stored(Matrix::mapped(file, from, shape, form)?),
            Packing::Int8 => Self::Int8(Int8Matrix::mapped(file, from, shape)?),
            Packing::Grouped(layout) => Self::Grouped(GroupedMatrix::mapped(file, from, shape, layout)?),
        })
    }

    /// The packed bytes, without a screen and corrections.
    pub(in crate::cpu) fn packed(&self) -> &[u8] {
        match self {
            Self::Stored(matrix) => matrix.data.bytes(),
            Self::Int8(matrix) => matrix.data.bytes(),
            Self::Grouped(matrix) => matrix.data.bytes(),
        }
    }

    /// Number of outputs of a matrix that is not paired; an error for a paired matrix (gate and up).
    pub(in crate::cpu) fn plain_outputs(&self) -> Result<usize, DeviceError> {
        if self.paired() {
            return Err(DeviceError::Misuse("gate and up, where a plain matrix is wanted".to_owned()));
        }
        Ok(self.outputs())
    }

    /// Number of gates of a paired matrix; an error for any other matrix.
    pub(in crate::cpu) fn gates(&self) -> Result<usize, DeviceError> {
        if !self.paired() {
            return Err(DeviceError::Misuse("a plain matrix, where gate and up are wanted".to_owned()));
        }
        Ok(self.outputs() / 2)
    }

    /// True if the matrices have the same shape and their elements the same form, so that one kernel multiplies both.
    pub(in crate::cpu) fn is_like(&self, other: &Self) -> bool {
        let form = match (self, other) {
            (Self::Stored(one), Self::Stored(other)) => one.data.is_like(&other.data),
            (Self::Int8(_), Self::Int8(_)) => true,
            (Self::Grouped(one), Self::Grouped(other)) => one.layout == other.layout,
            (Self::Stored(_) | Self::Int8(_) | Self::Grouped(_), _) => false,
        };
        form && self.shape() == other.shape()
    }

    pub(in crate::cpu) fn shape(&self) -> Shape {
        match self {
            Self::Stored(matrix) => matrix.shape,
            Self::Int8(matrix) => matrix.shape,
            Self::Grouped(matrix) => matrix.shape,
        }
    }

    fn paired(&self) -> bool {
        self.shape().paired
    }

    pub(in crate::cpu) fn outputs(&self) -> usize {
        self.shape().outputs
    }

    pub(in crate::cpu) fn inputs(&self) -> usize {
        self.shape().inputs
    }

    /// Size in bytes of the screen of an LM head; 0 if there is none.
    pub(in crate::cpu) fn screen_bytes(&self) -> usize {
        match self {
            Self::Stored(matrix) => matrix.screen_bytes(),
            Self::Int8(_) | Self::Grouped(_) => 0,
        }
    }

    /// Size in bytes of the corrections of a table of embeddings that is also the LM head; 0 if there are none.
    pub(in crate::cpu) fn corrections_bytes(&self) -> usize {
        match self {
            Self::Stored(matrix) => matrix.corrections_bytes(),
            Self::Int8(_) | Self::Grouped(_) => 0,
        }
    }

    /// Size in bytes, including a screen and corrections.
    pub(in crate::cpu) fn bytes(&self) -> usize {
        match self {
            Self::Stored(matrix) => {
                matrix.data.bytes().len() + matrix.screen_bytes() + matrix.corrections_bytes()
            }
            Self::Int8(matrix) => matrix.bytes(),
            Self::Grouped(matrix) => matrix.data.len(),
        }
    }
}
