//! A weight matrix as the device holds it.

use super::int8::Int8Matrix;
use super::isa::Path;
use super::matrix::Matrix;
use super::pool::ThreadPool;
use crate::{DeviceError, HostMatrix, Quantize};

/// A weight matrix, `y = x · Wᵀ`.
pub enum Weights {
    /// In the type of the checkpoint.
    Stored(Matrix),
    /// In eight bits.
    Int8(Int8Matrix),
}

impl Weights {
    pub(super) fn pack(
        path: Path,
        pool: &mut ThreadPool,
        parts: &[HostMatrix<'_>],
        quantize: Quantize,
    ) -> Result<Self, DeviceError> {
        Ok(match quantize {
            Quantize::None => Self::Stored(Matrix::pack(pool, parts)?),
            Quantize::Int8 => Self::Int8(Int8Matrix::pack(path, pool, parts)?),
        })
    }

    pub(super) fn outputs(&self) -> usize {
        match self {
            Self::Stored(matrix) => matrix.outputs,
            Self::Int8(matrix) => matrix.outputs,
        }
    }

    pub(super) fn inputs(&self) -> usize {
        match self {
            Self::Stored(matrix) => matrix.inputs,
            Self::Int8(matrix) => matrix.inputs,
        }
    }

    /// Bytes that it takes.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Stored(matrix) => matrix.data.bytes().len(),
            Self::Int8(matrix) => matrix.bytes(),
        }
    }
}
