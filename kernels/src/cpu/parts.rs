//! What a weight matrix is packed from: parts of a checkpoint, cut into panels of sixteen outputs.

use super::memory::Shared;
use super::pool::ThreadPool;
use super::simd::LANES;
use crate::{DeviceError, HostMatrix, WeightType};

/// The shape of a packed matrix.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    /// Whether its panels are those of gate and up in turn.
    pub(super) paired: bool,
}

impl Shape {
    /// Panels; the last one, or the last of gate and of up, may not be full.
    pub(super) fn panels(self) -> usize {
        if self.paired { 2 * (self.outputs / 2).div_ceil(LANES) } else { self.outputs.div_ceil(LANES) }
    }

    /// Steps of a panel: two inputs each.
    pub(super) fn steps(self) -> usize {
        self.inputs.div_ceil(2)
    }
}

/// Matrices of a checkpoint that fit together: one below the other or, where they are paired, two of as many rows.
#[derive(Clone, Copy)]
pub(super) struct Parts<'a> {
    parts: &'a [HostMatrix<'a>],
    pub(super) shape: Shape,
    pub(super) dtype: WeightType,
}

impl<'a> Parts<'a> {
    pub(super) fn new(parts: &'a [HostMatrix<'a>], paired: bool) -> Result<Self, DeviceError> {
        let first = parts.first().ok_or_else(|| DeviceError::Misuse("a matrix of no parts".to_owned()))?;
        let (inputs, dtype) = (first.columns, first.dtype);
        parts.iter().try_for_each(|part| check(part, inputs, dtype))?;
        let outputs = parts.iter().map(|part| part.rows).sum();
        if paired && !(parts.len() == 2 && 2 * first.rows == outputs) {
            let rows: Vec<usize> = parts.iter().map(|part| part.rows).collect();
            return Err(DeviceError::Misuse(format!("a pair of parts of {rows:?} rows")));
        }
        Ok(Self { parts, shape: Shape { outputs, inputs, paired }, dtype })
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &'a HostMatrix<'a>> {
        self.parts.iter()
    }

    /// Has `fill` make each panel of `to`, which consists of them and is zeroed, from the bytes of its rows. None is where the
    /// panel is not full.
    pub(super) fn pack(
        &self,
        pool: &mut ThreadPool,
        to: &mut [u8],
        fill: impl Fn(&[Option<&[u8]>; LANES], &mut [u8]) + Sync,
    ) -> Result<(), DeviceError> {
        let panels = self.shape.panels();
        let bytes = to.len() / panels.max(1);
        let to = Shared::new(to);
        pool.run(panels, |panel, _| {
            // SAFETY: each task has a panel to itself.
            fill(&self.rows(panel), unsafe { to.part(panel * bytes, bytes) });
        })
    }

    /// The rows of a panel: of the parts one below the other or, where two are paired, of the first and the second in turn,
    /// so that a gate and what it is for are computed side by side.
    fn rows(&self, panel: usize) -> [Option<&'a [u8]>; LANES] {
        let (parts, first) = match self.shape.paired {
            true => (&self.parts[panel % 2..][..1], panel / 2 * LANES),
            false => (self.parts, panel * LANES),
        };
        std::array::from_fn(|lane| row(parts, first + lane))
    }
}

/// Refuses a part that its bytes do not make, or that does not fit the others.
fn check(part: &HostMatrix<'_>, inputs: usize, dtype: WeightType) -> Result<(), DeviceError> {
    let bytes = part.rows.checked_mul(part.columns).and_then(|elements| elements.checked_mul(dtype.bytes()));
    if part.columns != inputs || part.dtype != dtype || bytes != Some(part.bytes.len()) {
        return Err(DeviceError::Misuse(format!(
            "a part of {} x {} {:?} in {} bytes among parts of {inputs} columns of {dtype:?}",
            part.rows,
            part.columns,
            part.dtype,
            part.bytes.len()
        )));
    }
    Ok(())
}

/// The bytes of row `index` of the parts taken as one matrix.
fn row<'a>(parts: &[HostMatrix<'a>], mut index: usize) -> Option<&'a [u8]> {
    for part in parts {
        if index < part.rows {
            let row = part.columns * part.dtype.bytes();
            return Some(&part.bytes[index * row..(index + 1) * row]);
        }
        index -= part.rows;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_do_not_fit_together_are_refused() {
        let part = |bytes, dtype, rows, columns| HostMatrix { bytes, dtype, rows, columns };
        let refused = |parts: &[HostMatrix<'_>], paired| {
            matches!(Parts::new(parts, paired), Err(DeviceError::Misuse(_)))
        };
        let good = part(&[0; 8], WeightType::F16, 2, 2);
        for bad in [
            part(&[0; 8], WeightType::Bf16, 2, 2),
            part(&[0; 8], WeightType::F16, 1, 4),
            part(&[0; 7], WeightType::F16, 2, 2),
            part(&[], WeightType::F16, usize::MAX, 2),
        ] {
            assert!(refused(&[good, bad], false));
        }
        assert!(refused(&[], false));
        for parts in [&[good][..], &[good, part(&[0; 4], WeightType::F16, 1, 2)], &[good; 4]] {
            assert!(refused(parts, true));
        }
        assert!(!refused(&[good; 2], true));
    }
}
