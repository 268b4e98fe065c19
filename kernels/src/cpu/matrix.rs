//! Weight matrices, repacked into panels once when they are loaded.

use std::fs::File;

use super::block_float::BlockFloats;
use super::format::{Bf16, F16, F32, Format, STEP, Stored};
use super::isa::Path;
use super::memory::{Buffer, Shared};
use super::pool::ThreadPool;
use super::simd::LANES;
use crate::{DeviceError, HostMatrix, WeightType};

/// A weight matrix as `[outputs / 16]` panels of `[inputs / 2]` steps (see [`super::format`]); outputs and inputs that
/// fill up the last panel and step are zeros.
pub struct Matrix {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    /// Whether its panels are those of gate and up in turn.
    pub(super) paired: bool,
    pub(super) data: Elements,
}

/// The elements of a matrix.
pub(super) enum Elements {
    /// In the type of the checkpoint.
    Stored(Stored),
    /// bfloat16 in another form.
    BlockFloats(BlockFloats),
}

impl Elements {
    /// As they lie in memory.
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Stored(data) => data.bytes(),
            Self::BlockFloats(data) => data.bytes(),
        }
    }
}

impl Matrix {
    /// Steps of a panel.
    pub(super) fn steps(&self) -> usize {
        self.inputs.div_ceil(2)
    }

    /// Panels.
    pub(super) fn panels(&self) -> usize {
        panels(self.outputs, self.paired)
    }

    /// Bytes of such a matrix, packed. `None` where there is no number for them.
    pub(super) fn len(outputs: usize, inputs: usize, paired: bool, form: Form) -> Option<usize> {
        let panels = panels(outputs, paired);
        match form {
            Form::Stored(dtype) => elements(panels, inputs)?.checked_mul(dtype.bytes()),
            Form::BlockFloats => BlockFloats::len(panels, inputs)?.checked_mul(size_of::<u16>()),
        }
    }

    /// Packs `parts`, one below the other or [`paired`](panel_rows). Beside the packed matrix nothing is allocated.
    pub(super) fn pack(
        path: Path,
        pool: &mut ThreadPool,
        parts: &[HostMatrix<'_>],
        paired: bool,
    ) -> Result<Self, DeviceError> {
        let (.., dtype) = check(parts, paired)?;
        Self::pack_as(Form::of(dtype, path), pool, parts, paired)
    }

    pub(super) fn pack_as(
        form: Form,
        pool: &mut ThreadPool,
        parts: &[HostMatrix<'_>],
        paired: bool,
    ) -> Result<Self, DeviceError> {
        let (outputs, inputs, _) = check(parts, paired)?;
        let panels = panels(outputs, paired);
        let data = match form {
            Form::Stored(dtype) => Elements::Stored(pack_stored(dtype, pool, parts, paired, panels, inputs)?),
            Form::BlockFloats => {
                Elements::BlockFloats(BlockFloats::pack(pool, parts, paired, panels, inputs)?)
            }
        };
        Ok(Self { outputs, inputs, paired, data })
    }

    /// One that was packed before, in place in a file from byte `from` on, where [`Self::len`] bytes are.
    pub(super) fn mapped(
        file: &File,
        from: u64,
        (outputs, inputs): (usize, usize),
        paired: bool,
        form: Form,
    ) -> Result<Self, DeviceError> {
        const WHAT: &str = "a packed weight matrix";
        let panels = panels(outputs, paired);
        let len = match form {
            Form::Stored(_) => elements(panels, inputs),
            Form::BlockFloats => BlockFloats::len(panels, inputs),
        };
        let len = len.ok_or(DeviceError::OutOfMemory { what: WHAT, wanted: usize::MAX })?;
        let data = match form {
            Form::Stored(WeightType::F32) => {
                Elements::Stored(Stored::F32(Buffer::mapped(file, from, len, WHAT)?))
            }
            Form::Stored(WeightType::F16) => {
                Elements::Stored(Stored::F16(Buffer::mapped(file, from, len, WHAT)?))
            }
            Form::Stored(WeightType::Bf16) => {
                Elements::Stored(Stored::Bf16(Buffer::mapped(file, from, len, WHAT)?))
            }
            Form::BlockFloats => {
                let data = Buffer::mapped(file, from, len, WHAT)?;
                Elements::BlockFloats(BlockFloats::new(data))
            }
        };
        Ok(Self { outputs, inputs, paired, data })
    }
}

/// What becomes of a checkpoint's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// They stay what they are.
    Stored(WeightType),
    /// See [`super::block_float`].
    BlockFloats,
}

impl Form {
    /// The form of weights of this type that suits a path's instructions.
    pub(super) fn of(dtype: WeightType, path: Path) -> Self {
        match dtype {
            WeightType::Bf16 if !path.dots_bf16() => Self::BlockFloats,
            _ => Self::Stored(dtype),
        }
    }
}

/// Elements of so many panels of a type. `None` where there is no number for them.
fn elements(panels: usize, inputs: usize) -> Option<usize> {
    inputs.div_ceil(2).checked_mul(STEP)?.checked_mul(panels)
}

fn pack_stored(
    dtype: WeightType,
    pool: &mut ThreadPool,
    parts: &[HostMatrix<'_>],
    paired: bool,
    panels: usize,
    inputs: usize,
) -> Result<Stored, DeviceError> {
    const WHAT: &str = "a weight matrix";
    let too_much = DeviceError::OutOfMemory { what: WHAT, wanted: usize::MAX };
    let mut packed = Stored::zeroed(dtype, elements(panels, inputs).ok_or(too_much)?, WHAT)?;
    let panel_bytes = inputs.div_ceil(2) * STEP * dtype.bytes();
    let data = Shared::new(packed.bytes_mut());
    pool.run(panels, |panel, _| {
        // SAFETY: each task has a panel to itself.
        let to = unsafe { data.part(panel * panel_bytes, panel_bytes) };
        let rows = panel_rows(parts, paired, panel);
        match dtype {
            WeightType::F32 => pack_panel::<F32>(&rows, inputs, to),
            WeightType::F16 => pack_panel::<F16>(&rows, inputs, to),
            WeightType::Bf16 => pack_panel::<Bf16>(&rows, inputs, to),
        }
    })?;
    Ok(packed)
}

/// Panels of so many outputs.
pub(super) fn panels(outputs: usize, paired: bool) -> usize {
    if paired { 2 * (outputs / 2).div_ceil(LANES) } else { outputs.div_ceil(LANES) }
}

/// Outputs, inputs and type of the matrix that `parts` make.
pub(super) fn check(
    parts: &[HostMatrix<'_>],
    paired: bool,
) -> Result<(usize, usize, WeightType), DeviceError> {
    let first = parts.first().ok_or_else(|| DeviceError::Misuse("a matrix of no parts".to_owned()))?;
    let (inputs, dtype) = (first.columns, first.dtype);
    parts.iter().try_for_each(|part| check_part(part, inputs, dtype))?;
    let outputs = parts.iter().map(|part| part.rows).sum();
    if paired && !(parts.len() == 2 && 2 * first.rows == outputs) {
        let rows: Vec<usize> = parts.iter().map(|part| part.rows).collect();
        return Err(DeviceError::Misuse(format!("a pair of parts of {rows:?} rows")));
    }
    Ok((outputs, inputs, dtype))
}

/// Refuses a part that its bytes do not make, or that does not fit the others.
fn check_part(part: &HostMatrix<'_>, inputs: usize, dtype: WeightType) -> Result<(), DeviceError> {
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

/// The rows of panel `panel`: of the parts one below the other or, where two are paired, of the first and the second in
/// turn, so that a gate and what it is for are computed side by side.
pub(super) fn panel_rows<'a>(
    parts: &[HostMatrix<'a>],
    paired: bool,
    panel: usize,
) -> [Option<&'a [u8]>; LANES] {
    let (parts, first) = match (paired, parts) {
        (true, [_, _]) => (&parts[panel % 2..][..1], panel / 2 * LANES),
        _ => (parts, panel * LANES),
    };
    std::array::from_fn(|lane| row_bytes(parts, first + lane))
}

/// Row `index` of the parts taken as one matrix.
fn row_bytes<'a>(parts: &[HostMatrix<'a>], mut index: usize) -> Option<&'a [u8]> {
    for part in parts {
        if index < part.rows {
            let row = part.columns * part.dtype.bytes();
            return Some(&part.bytes[index * row..(index + 1) * row]);
        }
        index -= part.rows;
    }
    None
}

// Files are little-endian, and their elements are taken over as they are.
const _: () = assert!(cfg!(target_endian = "little"), "weights are packed on little-endian machines only");

/// Fills a zeroed panel with these outputs' bytes; those that are missing stay zeros.
fn pack_panel<W: Format>(rows: &[Option<&[u8]>; LANES], inputs: usize, panel: &mut [u8]) {
    let size = size_of::<W::Raw>();
    let whole = rows.map(Option::unwrap_or_default);
    let packed = match rows.iter().all(Option::is_some) {
        // Two inputs of an output lie together.
        true if W::place(1, 0) == 1 && size == 2 => pack_blocks::<4>(whole, panel) / size,
        true if size == 2 => pack_blocks::<2>(whole, panel) / size,
        true => pack_blocks::<4>(whole, panel) / size,
        false => 0,
    };
    for (lane, row) in rows.iter().enumerate() {
        let Some(row) = row else { continue };
        for input in packed..inputs {
            let at = (input / 2 * STEP + W::place(input % 2, lane)) * size;
            panel[at..at + size].copy_from_slice(&row[input * size..][..size]);
        }
    }
}

/// Packs as many whole blocks of sixteen units of sixteen rows as there are; gives back how many bytes of each row these
/// are. They are transposed one after the other, so that the panel is written in order while each row is read a cache line
/// at once.
fn pack_blocks<const UNIT: usize>(rows: [&[u8]; LANES], panel: &mut [u8]) -> usize {
    let rows = rows.map(|row| row.as_chunks::<UNIT>().0.as_chunks::<LANES>().0);
    let blocks = panel.as_chunks_mut::<UNIT>().0.as_chunks_mut::<{ LANES * LANES }>().0;
    let whole = rows.iter().map(|row| row.len()).min().unwrap_or_default();
    for (index, block) in blocks.iter_mut().take(whole).enumerate() {
        for (lane, row) in rows.iter().enumerate() {
            for (unit, from) in row[index].iter().enumerate() {
                block[unit * LANES + lane] = *from;
            }
        }
    }
    whole * LANES * UNIT
}

#[cfg(test)]
mod tests {
    use super::super::isa::Isa;
    use super::*;

    #[test]
    fn parts_are_laid_one_below_the_other_in_panels() {
        // 21 outputs by 5 inputs in two parts, element (output, input) = 100 * output + input.
        let values: Vec<f32> = (0..21 * 5).map(|i| (100 * (i / 5) + i % 5) as f32).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let (top, bottom) = bytes.split_at(13 * 5 * 4);
        let part = |bytes, rows| HostMatrix { bytes, dtype: WeightType::F32, rows, columns: 5 };
        let mut pool = ThreadPool::new(2).unwrap();
        let form = Form::Stored(WeightType::F32);
        let matrix = Matrix::pack_as(form, &mut pool, &[part(top, 13), part(bottom, 8)], false).unwrap();
        let Elements::Stored(Stored::F32(data)) = &matrix.data else { unreachable!() };
        assert_eq!((matrix.panels(), matrix.steps(), data.len()), (2, 3, 2 * 3 * STEP));
        for output in 0..32 {
            for input in 0..6 {
                let got = data[output / 16 * 3 * STEP + input / 2 * STEP + input % 2 * 16 + output % 16];
                let want = if output < 21 && input < 5 { (100 * output + input) as f32 } else { 0.0 };
                assert_eq!(got, want, "output {output}, input {input}");
            }
        }
    }

    #[test]
    fn blocks_and_what_is_left_of_them_are_packed_alike() {
        // Two whole panels and five outputs; one block of inputs, or two, or three, and nine more.
        let (outputs, inputs) = (37, 57);
        let mut pool = ThreadPool::new(2).unwrap();
        for dtype in [WeightType::F32, WeightType::F16, WeightType::Bf16] {
            let size = dtype.bytes();
            // All bytes differ from those that others could be taken for.
            let bytes: Vec<u8> =
                (0..outputs * inputs * size).map(|i| (i % 251) as u8 ^ (i / 251) as u8).collect();
            let part = HostMatrix { bytes: &bytes, dtype, rows: outputs, columns: inputs };
            let matrix = Matrix::pack_as(Form::Stored(dtype), &mut pool, &[part], false).unwrap();
            let (packed, panel) = (matrix.data.bytes(), matrix.steps() * STEP * size);
            assert_eq!(packed.len(), 3 * panel);
            for output in 0..48 {
                for input in 0..58 {
                    let place = match dtype {
                        WeightType::Bf16 => output % 16 * 2 + input % 2,
                        _ => input % 2 * 16 + output % 16,
                    };
                    let got = &packed[output / 16 * panel + (input / 2 * 32 + place) * size..][..size];
                    let zeros = [0; 4];
                    let want = match output < outputs && input < inputs {
                        true => &bytes[(output * inputs + input) * size..][..size],
                        false => &zeros[..size],
                    };
                    assert_eq!(got, want, "{dtype:?}, output {output}, input {input}");
                }
            }
        }
    }

    #[test]
    fn panels_of_a_pair_take_turns() {
        // Two parts of 17 outputs by 2 inputs, all elements of an output the same.
        let values: Vec<f32> = (0..34 * 2).map(|i| (i / 2 + 1) as f32).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let (gate, up) = bytes.split_at(17 * 2 * 4);
        let part = |bytes| HostMatrix { bytes, dtype: WeightType::F32, rows: 17, columns: 2 };
        let mut pool = ThreadPool::new(1).unwrap();
        let form = Form::Stored(WeightType::F32);
        let matrix = Matrix::pack_as(form, &mut pool, &[part(gate), part(up)], true).unwrap();
        let Elements::Stored(Stored::F32(data)) = &matrix.data else { unreachable!() };
        assert_eq!((matrix.panels(), data.len()), (4, 4 * STEP));
        let first_of = |panel: usize| [data[panel * STEP], data[panel * STEP + 1]];
        assert_eq!([0, 1, 2, 3].map(first_of), [[1.0, 2.0], [18.0, 19.0], [17.0, 0.0], [34.0, 0.0]]);
    }

    #[test]
    fn parts_that_do_not_fit_together_are_refused() {
        let (mut pool, path) = (ThreadPool::new(1).unwrap(), Path::new(Isa::Portable).unwrap());
        let part = |bytes, dtype, rows, columns| HostMatrix { bytes, dtype, rows, columns };
        let good = part(&[0; 8], WeightType::F16, 2, 2);
        for bad in [
            part(&[0; 8], WeightType::Bf16, 2, 2),
            part(&[0; 8], WeightType::F16, 1, 4),
            part(&[0; 7], WeightType::F16, 2, 2),
            part(&[], WeightType::F16, usize::MAX, 2),
        ] {
            assert!(matches!(
                Matrix::pack(path, &mut pool, &[good, bad], false),
                Err(DeviceError::Misuse(_))
            ));
        }
        assert!(Matrix::pack(path, &mut pool, &[], false).is_err());
        for parts in [&[good][..], &[good, part(&[0; 4], WeightType::F16, 1, 2)], &[good; 4]] {
            assert!(matches!(Matrix::pack(path, &mut pool, parts, true), Err(DeviceError::Misuse(_))));
        }
    }
}
