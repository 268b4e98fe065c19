//! The source of a packed weight matrix: one or more matrices of a checkpoint, cut into panels of sixteen outputs.

use crate::cpu::memory::Shared;
use crate::cpu::simd::LANES;
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeviceError, HostMatrix, WeightType};

/// The shape of a packed matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) struct Shape {
    pub(in crate::cpu) outputs: usize,
    pub(in crate::cpu) inputs: usize,
    /// True if the matrix holds a gate and an up matrix, whose panels alternate.
    pub(in crate::cpu) paired: bool,
}

impl Shape {
    /// Number of panels. The last panel can be partly empty. In a paired matrix, both the last panel of gate and the
    /// last panel of up can be partly empty.
    pub(in crate::cpu) fn panels(self) -> usize {
        if self.paired { 2 * (self.outputs / 2).div_ceil(LANES) } else { self.outputs.div_ceil(LANES) }
    }

    /// Number of steps per panel. A step is two inputs.
    pub(in crate::cpu) fn steps(self) -> usize {
        self.inputs.div_ceil(2)
    }
}

/// Matrices of a checkpoint that one packed matrix holds: stacked one below another (q, k and v), or a pair with the
/// same number of rows (gate and up). All have the same number of columns and the same element type.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct FusedMatrices<'a> {
    matrices: &'a [HostMatrix<'a>],
    pub(in crate::cpu) shape: Shape,
    pub(in crate::cpu) dtype: WeightType,
}

impl<'a> FusedMatrices<'a> {
    pub(in crate::cpu) fn new(matrices: &'a [HostMatrix<'a>], paired: bool) -> Result<Self, DeviceError> {
        let first =
            matrices.first().ok_or_else(|| DeviceError::Misuse("no matrices to fuse into one".to_owned()))?;
        let (inputs, dtype) = (first.columns, first.dtype);
        matrices.iter().try_for_each(|matrix| check(matrix, inputs, dtype))?;
        let outputs = matrices.iter().map(|matrix| matrix.rows).sum();
        if paired && !(matrices.len() == 2 && 2 * first.rows == outputs) {
            let rows: Vec<usize> = matrices.iter().map(|matrix| matrix.rows).collect();
            return Err(DeviceError::Misuse(format!("gate and up as matrices of {rows:?} rows")));
        }
        Ok(Self { matrices, shape: Shape { outputs, inputs, paired }, dtype })
    }

    pub(in crate::cpu) fn iter(&self) -> impl Iterator<Item = &'a HostMatrix<'a>> {
        self.matrices.iter()
    }

    /// Calls `fill` for each panel, in parallel, with the bytes of the panel's sixteen rows of weights and the panel's
    /// share of `to`. A row is `None` if it is beyond the last output. The caller zeroes `to`.
    pub(in crate::cpu) fn pack(
        &self,
        pool: &mut ThreadPool,
        to: &mut [u8],
        fill: impl Fn(&[Option<&[u8]>; LANES], &mut [u8]) + Sync,
    ) -> Result<(), DeviceError> {
        let panels = self.shape.panels();
        let bytes = to.len() / panels.max(1);
        let to = Shared::new(to);
        pool.run(panels, |panel, _| {
            // SAFETY: each task accesses only its own panel.
            fill(&self.rows(panel), unsafe { to.slice_mut(panel * bytes, bytes) });
        })
    }

    /// The rows of a panel. In a paired matrix, the panels of gate and up alternate, so that a gate and the value that
    /// it multiplies are computed side by side.
    pub(in crate::cpu) fn rows(&self, panel: usize) -> [Option<&'a [u8]>; LANES] {
        let (matrices, first) = match self.shape.paired {
            true => (&self.matrices[panel % 2..][..1], panel / 2 * LANES),
            false => (self.matrices, panel * LANES),
        };
        std::array::from_fn(|lane| row(matrices, first + lane))
    }
}

/// Returns an error if a matrix's bytes do not match its shape, or if its columns or type differ from `inputs` and
/// `dtype`.
fn check(matrix: &HostMatrix<'_>, inputs: usize, dtype: WeightType) -> Result<(), DeviceError> {
    let HostMatrix { rows, columns, stride, .. } = *matrix;
    let fits = stride >= columns && matrix.extent() == Some(matrix.bytes.len());
    if columns != inputs || matrix.dtype != dtype || !fits {
        return Err(DeviceError::Misuse(format!(
            "a matrix of {rows} x {columns} {:?}, row stride {stride}, in {} bytes among matrices of {inputs} columns of \
             {dtype:?}",
            matrix.dtype,
            matrix.bytes.len()
        )));
    }
    Ok(())
}

/// The bytes of row `index` of the matrices stacked as one; `None` beyond the last row.
fn row<'a>(matrices: &[HostMatrix<'a>], mut index: usize) -> Option<&'a [u8]> {
    for matrix in matrices {
        if index < matrix.rows {
            return Some(matrix.row(index));
        }
        index -= matrix.rows;
    }
    None
}

#[cfg(test)]
mod tests;
