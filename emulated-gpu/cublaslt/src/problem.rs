//! A matrix product D = alpha op(A) op(B) + beta C: the checks of its descriptors, and its algorithm.

use crate::objects::{Description, Layout, Preference};
use crate::status::Status;

/// Element type of a matrix, by its `cudaDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `CUDA_R_32F`.
    F32,
    /// `CUDA_R_16F`.
    F16,
    /// `CUDA_R_16BF`.
    Bf16,
}

impl Kind {
    fn of(code: i32) -> Option<Kind> {
        match code {
            0 => Some(Kind::F32),
            2 => Some(Kind::F16),
            14 => Some(Kind::Bf16),
            _ => None,
        }
    }

    /// Bytes per element.
    pub fn bytes(self) -> u64 {
        match self {
            Kind::F32 => 4,
            Kind::F16 | Kind::Bf16 => 2,
        }
    }
}

/// Shape and strides of a matrix in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Type of the elements.
    pub kind: Kind,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub columns: usize,
    /// Distance in elements between neighbouring rows.
    pub row_stride: usize,
    /// Distance in elements between neighbouring columns.
    pub column_stride: usize,
    /// Distance in elements between neighbouring matrices of the batch.
    pub batch_stride: usize,
}

impl Matrix {
    fn of(layout: &Layout) -> Result<Matrix, Status> {
        let kind = Kind::of(layout.kind).ok_or(Status::NOT_SUPPORTED)?;
        let (rows, columns) = (layout.rows as usize, layout.columns as usize);
        let leading = usize::try_from(layout.leading).map_err(|_| Status::INVALID_VALUE)?;
        let (row_stride, column_stride, shortest) = match layout.order {
            0 => (1, leading, rows),
            1 => (leading, 1, columns),
            _ => return Err(Status::NOT_SUPPORTED),
        };
        if rows == 0 || columns == 0 || leading < shortest {
            return Err(Status::INVALID_VALUE);
        }
        let batch_stride = usize::try_from(layout.stride).map_err(|_| Status::NOT_SUPPORTED)?;
        Ok(Matrix { kind, rows, columns, row_stride, column_stride, batch_stride })
    }

    /// Returns the transposed matrix, in the same memory.
    pub fn transposed(self) -> Matrix {
        Matrix {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// Returns the number of elements in memory from the first matrix's start to the last matrix's end, gaps included.
    pub fn extent(&self, batch: usize) -> usize {
        (batch - 1) * self.batch_stride
            + (self.rows - 1) * self.row_stride
            + (self.columns - 1) * self.column_stride
            + 1
    }
}

/// A matrix product whose descriptors are valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Problem {
    /// op(A): m rows, k columns.
    pub a: Matrix,
    /// op(B): k rows, n columns.
    pub b: Matrix,
    /// C: m rows, n columns.
    pub c: Matrix,
    /// D: m rows, n columns.
    pub d: Matrix,
    /// Number of matrices per operand in the batch.
    pub batch: usize,
    /// True if f32 operands are rounded to TF32, as on tensor cores.
    pub tf32: bool,
    /// Device address, batch stride in elements and type of the bias, if the epilogue adds one.
    pub bias: Option<(u64, usize, Kind)>,
}

/// Layouts of A, B, C and D.
pub type Layouts<'a> = [&'a Layout; 4];

const COMPUTE_32F: i32 = 68;
const COMPUTE_32F_PEDANTIC: i32 = 69;
const COMPUTE_32F_FAST_TF32: i32 = 77;
const EPILOGUE_DEFAULT: i32 = 1;
const EPILOGUE_BIAS: i32 = 4;

impl Problem {
    /// Checks descriptors, and returns the matrix product that they describe.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` for sizes that do not match, `NOT_SUPPORTED` for a combination without a kernel.
    pub fn new(description: &Description, layouts: Layouts) -> Result<Problem, Status> {
        let known = [COMPUTE_32F, COMPUTE_32F_PEDANTIC, COMPUTE_32F_FAST_TF32].contains(&description.compute);
        if !known || description.scale != 0 || description.pointer_mode != 0 || description.operations[2] != 0
        {
            return Err(Status::NOT_SUPPORTED);
        }
        let [a, b, c, d] = layouts.map(Matrix::of);
        let (a, b, c, d) = (a?, b?, c?, d?);
        let operand = |matrix: Matrix, operation| match operation {
            0 => Ok(matrix),
            // Conjugation changes nothing in real matrices.
            1 | 2 => Ok(matrix.transposed()),
            _ => Err(Status::INVALID_VALUE),
        };
        let (a, b) = (operand(a, description.operations[0])?, operand(b, description.operations[1])?);
        let fits = a.columns == b.rows && [c, d].iter().all(|x| (x.rows, x.columns) == (a.rows, b.columns));
        if !fits {
            return Err(Status::INVALID_VALUE);
        }
        let tf32 = description.compute == COMPUTE_32F_FAST_TF32;
        let kinds = a.kind == b.kind && c.kind == d.kind && (d.kind == a.kind || d.kind == Kind::F32);
        if !kinds || tf32 && a.kind != Kind::F32 {
            return Err(Status::NOT_SUPPORTED);
        }
        let batch = layouts[3].batch;
        if batch < 1 || layouts.iter().any(|layout| layout.batch != batch) {
            return Err(Status::INVALID_VALUE);
        }
        let batch = batch as usize;
        if batch > 1 && d.batch_stride < d.extent(1) {
            return Err(Status::INVALID_VALUE);
        }
        let bias = match description.epilogue {
            EPILOGUE_DEFAULT => None,
            EPILOGUE_BIAS => Some(bias(description, d.kind)?),
            _ => return Err(Status::NOT_SUPPORTED),
        };
        Ok(Problem { a, b, c, d, batch, tf32, bias })
    }
}

fn bias(description: &Description, kind: Kind) -> Result<(u64, usize, Kind), Status> {
    let kind = match description.bias_kind {
        -1 => kind,
        code => Kind::of(code).filter(|&own| own == kind || own == Kind::F32).ok_or(Status::NOT_SUPPORTED)?,
    };
    let stride = usize::try_from(description.bias_stride).map_err(|_| Status::INVALID_VALUE)?;
    if description.bias == 0 {
        return Err(Status::INVALID_VALUE);
    }
    Ok((description.bias, stride, kind))
}

/// First word of every algorithm that this library makes.
const MAGIC: u64 = u64::from_be_bytes(*b"tutti-lt");
/// Largest alignment that an algorithm needs, in bytes. It is the width of a kernel's widest load.
const WIDEST_LOAD: u32 = 16;
/// Workspace of an algorithm, in bytes. An algorithm has no workspace if the preference allows less.
const WORKSPACE_BYTES: u64 = 4096;

/// `cublasLtMatmulAlgo_t`: words that are opaque to the program. They identify the matrix product for which the
/// algorithm was requested.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Algorithm {
    magic: u64,
    /// The result of [`form`] for the matrix product.
    form: u64,
    /// Workspace that the algorithm needs, in bytes.
    pub workspace_bytes: u64,
    /// Alignment that the algorithm needs of A, B, C and D, in bytes.
    alignment: [u32; 4],
    /// The [`Variant`].
    variant: u64,
    unused: [u64; 2],
}

/// The variants of an algorithm, as NVIDIA's library has tiles of several sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// Supports all sizes.
    Plain,
    /// Adds in the order of [`Plain`](Self::Plain), but supports only products of at least [`WIDE`] columns.
    Wide,
    /// Adds in the reverse order, so that the bits differ.
    Reverse,
}

impl Variant {
    /// All variants, in the order in which the library proposes them.
    pub const ALL: [Variant; 3] = [Variant::Plain, Variant::Wide, Variant::Reverse];
}

/// The least number of columns of D that [`Variant::Wide`] supports.
pub const WIDE: usize = 32;

/// Packs types, transposes and orders into one word. A transposed matrix in column order gives the same word as an
/// untransposed one in row order, because their strides are equal.
fn form(problem: &Problem) -> u64 {
    [problem.a, problem.b, problem.c, problem.d].iter().fold(u64::from(problem.tf32), |form, matrix| {
        let rows_first = u64::from(matrix.column_stride == 1);
        (form << 4) | (matrix.kind as u64) << 1 | rows_first
    })
}

impl Algorithm {
    /// Returns the algorithm for a matrix product.
    pub fn new(problem: &Problem, preference: &Preference, variant: Variant) -> Self {
        Algorithm {
            magic: MAGIC,
            form: form(problem),
            workspace_bytes: if preference.workspace_bytes < WORKSPACE_BYTES { 0 } else { WORKSPACE_BYTES },
            alignment: preference.alignment.map(|alignment| alignment.min(WIDEST_LOAD)),
            variant: variant as u64,
            unused: [0; 2],
        }
    }

    /// The algorithm's variant; `None` for an algorithm of another library.
    pub fn variant(&self) -> Option<Variant> {
        Variant::ALL.into_iter().find(|variant| *variant as u64 == self.variant)
    }

    /// Returns an error if the algorithm does not support a matrix product.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` for an algorithm of another library, `NOT_SUPPORTED` for other types, transposes or orders, and
    /// for too few columns.
    pub fn supports(&self, problem: &Problem) -> Result<(), Status> {
        let variant = self.variant().filter(|_| self.magic == MAGIC).ok_or(Status::INVALID_VALUE)?;
        if self.form != form(problem) || variant == Variant::Wide && problem.d.columns < WIDE {
            return Err(Status::NOT_SUPPORTED);
        }
        Ok(())
    }

    /// Checks that the algorithm fits a matrix product, the addresses of A, B, C and D, and a workspace (address,
    /// bytes).
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` for an algorithm of another library and for a workspace that is missing, too small or not
    /// aligned to 16 bytes; `NOT_SUPPORTED` for other types, transposes or orders, and for operands with less alignment
    /// than the preference promised.
    pub fn check(&self, problem: &Problem, addresses: [u64; 4], workspace: (u64, u64)) -> Result<(), Status> {
        self.supports(problem)?;
        let (address, bytes) = workspace;
        let needed = self.workspace_bytes;
        if needed > 0 && (bytes < needed || address == 0 || !address.is_multiple_of(16)) {
            return Err(Status::INVALID_VALUE);
        }
        let aligned =
            addresses.iter().zip(self.alignment).all(|(a, alignment)| a.is_multiple_of(u64::from(alignment)));
        if aligned { Ok(()) } else { Err(Status::NOT_SUPPORTED) }
    }
}

#[cfg(test)]
mod tests;
