//! Descriptors: the objects in which a program describes a matrix product. The descriptors accept any values, which
//! `problem` checks later.

use crate::status::Status;

/// An attribute's bytes, as a program passes them.
pub type Bytes<'a> = &'a [u8];

fn value<const N: usize>(bytes: Bytes) -> Result<[u8; N], Status> {
    bytes.get(..N).and_then(|head| head.try_into().ok()).ok_or(Status::INVALID_VALUE)
}

fn word(bytes: Bytes) -> Result<i32, Status> {
    value(bytes).map(i32::from_ne_bytes)
}

fn wide(bytes: Bytes) -> Result<u64, Status> {
    value(bytes).map(u64::from_ne_bytes)
}

/// `cublasLtMatrixLayout_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// `cudaDataType_t`.
    pub kind: i32,
    /// `cublasLtOrder_t`.
    pub order: i32,
    /// Number of rows.
    pub rows: u64,
    /// Number of columns.
    pub columns: u64,
    /// Leading dimension, in elements: the distance between neighbouring columns or, in row order, rows.
    pub leading: i64,
    /// Number of matrices.
    pub batch: i32,
    /// Distance in elements between neighbouring matrices of the batch.
    pub stride: i64,
}

impl Layout {
    /// Sets an attribute (`cublasLtMatrixLayoutAttribute_t`).
    ///
    /// # Errors
    ///
    /// `NOT_SUPPORTED` for an unknown attribute, `INVALID_VALUE` for too few bytes.
    pub fn set(&mut self, attribute: u32, bytes: Bytes) -> Result<(), Status> {
        match attribute {
            0 => self.kind = word(bytes)?,
            1 => self.order = word(bytes)?,
            2 => self.rows = wide(bytes)?,
            3 => self.columns = wide(bytes)?,
            4 => self.leading = wide(bytes)? as i64,
            5 => self.batch = word(bytes)?,
            6 => self.stride = wide(bytes)? as i64,
            _ => return Err(Status::NOT_SUPPORTED),
        }
        Ok(())
    }
}

/// `cublasLtMatmulDesc_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Description {
    /// `cublasComputeType_t`.
    pub compute: i32,
    /// `cudaDataType_t` of alpha and beta.
    pub scale: i32,
    /// `cublasLtPointerMode_t` of alpha and beta.
    pub pointer_mode: i32,
    /// `cublasOperation_t` of A, B and C.
    pub operations: [i32; 3],
    /// `cublasLtEpilogue_t`.
    pub epilogue: i32,
    /// Device address of the bias; 0 means no bias.
    pub bias: u64,
    /// Distance in elements between the biases of neighbouring matrices.
    pub bias_stride: i64,
    /// `cudaDataType_t` of the bias; -1 means the type of D.
    pub bias_kind: i32,
}

impl Description {
    /// Returns a description with the defaults of NVIDIA's library.
    pub fn new(compute: i32, scale: i32) -> Self {
        Description {
            compute,
            scale,
            pointer_mode: 0,
            operations: [0; 3],
            epilogue: 1,
            bias: 0,
            bias_stride: 0,
            bias_kind: -1,
        }
    }

    /// Sets an attribute (`cublasLtMatmulDescAttributes_t`).
    ///
    /// # Errors
    ///
    /// `NOT_SUPPORTED` for an unknown attribute, `INVALID_VALUE` for too few bytes.
    pub fn set(&mut self, attribute: u32, bytes: Bytes) -> Result<(), Status> {
        match attribute {
            0 => self.compute = word(bytes)?,
            1 => self.scale = word(bytes)?,
            2 => self.pointer_mode = word(bytes)?,
            3..=5 => self.operations[attribute as usize - 3] = word(bytes)?,
            7 => self.epilogue = word(bytes)?,
            8 => self.bias = wide(bytes)?,
            10 => self.bias_stride = wide(bytes)? as i64,
            26 => self.bias_kind = word(bytes)?,
            _ => return Err(Status::NOT_SUPPORTED),
        }
        Ok(())
    }
}

/// `cublasLtMatmulPreference_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preference {
    /// Largest workspace, in bytes.
    pub workspace_bytes: u64,
    /// Alignment that the program promises for A, B, C and D, in bytes.
    pub alignment: [u32; 4],
}

impl Preference {
    /// Returns the defaults of NVIDIA's library: no workspace, and an alignment of 256 bytes.
    pub fn new() -> Self {
        Preference { workspace_bytes: 0, alignment: [256; 4] }
    }

    /// Sets an attribute (`cublasLtMatmulPreferenceAttributes_t`). The search mode, the reduction scheme, the wave
    /// count and the masks of implementations have no effect, because this library has one algorithm per product.
    ///
    /// # Errors
    ///
    /// `NOT_SUPPORTED` for an unknown attribute, `INVALID_VALUE` for too few bytes.
    pub fn set(&mut self, attribute: u32, bytes: Bytes) -> Result<(), Status> {
        match attribute {
            0 | 3 | 9 => {
                word(bytes)?;
            }
            12 => {
                wide(bytes)?;
            }
            1 => self.workspace_bytes = wide(bytes)?,
            5..=8 => self.alignment[attribute as usize - 5] = word(bytes)? as u32,
            _ => return Err(Status::NOT_SUPPORTED),
        }
        Ok(())
    }
}
