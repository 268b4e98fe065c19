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
        paired: bool,
        quantize: Quantize,
    ) -> Result<Self, DeviceError> {
        Ok(match quantize {
            Quantize::None => Self::Stored(Matrix::pack(pool, parts, paired)?),
            Quantize::Int8 => Self::Int8(Int8Matrix::pack(path, pool, parts, paired)?),
        })
    }

    /// Outputs, where they lie one after the other.
    pub(super) fn plain_outputs(&self) -> Result<usize, DeviceError> {
        if self.paired() {
            return Err(DeviceError::Misuse("gate and up, where a plain matrix is wanted".to_owned()));
        }
        Ok(self.outputs())
    }

    /// Gates, where outputs are gate and up.
    pub(super) fn gates(&self) -> Result<usize, DeviceError> {
        if !self.paired() {
            return Err(DeviceError::Misuse("a plain matrix, where gate and up are wanted".to_owned()));
        }
        Ok(self.outputs() / 2)
    }

    fn paired(&self) -> bool {
        match self {
            Self::Stored(matrix) => matrix.paired,
            Self::Int8(matrix) => matrix.paired,
        }
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
