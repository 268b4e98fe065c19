//! Weight matrices, repacked into panels once when they are loaded.

use std::fs::File;

use super::block_float::BlockFloatPanels;
use super::format::{Bf16, F16, F32, Format, STEP, Stored};
use super::fused_matrices::{FusedMatrices, Shape};
use super::isa::Path;
use super::memory::Buffer;
use super::pool::ThreadPool;
use super::simd::LANES;
use crate::{DeviceError, WeightType};

/// A weight matrix as `[outputs / 16]` panels of `[inputs / 2]` steps (see [`super::format`]); outputs and inputs that
/// fill up the last panel and step are zeros.
pub struct Matrix {
    pub(super) shape: Shape,
    pub(super) data: Elements,
}

/// The elements of a matrix.
pub(super) enum Elements {
    /// In the type of the checkpoint.
    Stored(Stored),
    /// bfloat16 in another form.
    BlockFloat(BlockFloatPanels),
}

impl Elements {
    /// As they lie in memory.
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Stored(data) => data.bytes(),
            Self::BlockFloat(data) => data.bytes(),
        }
    }
}

impl Matrix {
    /// Bytes of such a matrix, packed. `None` where there is no number for them.
    pub(super) fn len(shape: Shape, form: Form) -> Option<usize> {
        match form {
            Form::Stored(dtype) => elements(shape)?.checked_mul(dtype.bytes()),
            Form::BlockFloat => BlockFloatPanels::len(shape)?.checked_mul(size_of::<u16>()),
        }
    }

    /// Packs `parts`, as they are or as block floats of them. Beside the packed matrix nothing is allocated.
    pub(super) fn pack(
        form: Form,
        pool: &mut ThreadPool,
        source: FusedMatrices<'_>,
    ) -> Result<Self, DeviceError> {
        let data = match form {
            Form::Stored(dtype) => Elements::Stored(pack_stored(dtype, pool, source)?),
            Form::BlockFloat => Elements::BlockFloat(BlockFloatPanels::pack(pool, source)?),
        };
        Ok(Self { shape: source.shape, data })
    }

    /// One that was packed before, in place in a file from byte `from` on, where [`Self::len`] bytes are.
    pub(super) fn mapped(file: &File, from: u64, shape: Shape, form: Form) -> Result<Self, DeviceError> {
        const WHAT: &str = "a packed weight matrix";
        let len = elements(shape);
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
            Form::BlockFloat => {
                let data = Buffer::mapped(file, from, BlockFloatPanels::len(shape), WHAT)?;
                Elements::BlockFloat(BlockFloatPanels::new(data))
            }
        };
        Ok(Self { shape, data })
    }
}

/// What becomes of a checkpoint's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// They stay what they are.
    Stored(WeightType),
    /// See [`super::block_float`].
    BlockFloat,
}

impl Form {
    /// The form of weights of this type that suits a path's instructions.
    pub(super) fn of(dtype: WeightType, path: Path) -> Self {
        match dtype {
            WeightType::Bf16 if !path.dots_bf16() => Self::BlockFloat,
            _ => Self::Stored(dtype),
        }
    }
}

/// Elements of a matrix that is stored as it is. `None` where there is no number for them.
fn elements(shape: Shape) -> Option<usize> {
    shape.steps().checked_mul(STEP)?.checked_mul(shape.panels())
}

fn pack_stored(
    dtype: WeightType,
    pool: &mut ThreadPool,
    source: FusedMatrices<'_>,
) -> Result<Stored, DeviceError> {
    let inputs = source.shape.inputs;
    let mut packed = Stored::zeroed(dtype, elements(source.shape), "a weight matrix")?;
    source.pack(pool, packed.bytes_mut(), |rows, to| match dtype {
        WeightType::F32 => pack_panel::<F32>(rows, inputs, to),
        WeightType::F16 => pack_panel::<F16>(rows, inputs, to),
        WeightType::Bf16 => pack_panel::<Bf16>(rows, inputs, to),
    })?;
    Ok(packed)
}

// Files are little-endian, and their elements are taken over as they are.
const _: () = assert!(cfg!(target_endian = "little"), "weights are packed on little-endian machines only");

/// Fills a zeroed panel with these outputs' bytes; those that are missing stay zeros.
fn pack_panel<W: Format>(rows: &[Option<&[u8]>; LANES], inputs: usize, panel: &mut [u8]) {
    let size = size_of::<W::Raw>();
    let whole = rows.map(Option::unwrap_or_default);
    let packed = match rows.iter().all(Option::is_some) {
        // Two inputs of an output lie together.
        true if W::index_in_step(1, 0) == 1 && size == 2 => pack_blocks::<4>(whole, panel) / size,
        true if size == 2 => pack_blocks::<2>(whole, panel) / size,
        true => pack_blocks::<4>(whole, panel) / size,
        false => 0,
    };
    for (lane, row) in rows.iter().enumerate() {
        let Some(row) = row else { continue };
        for input in packed..inputs {
            let at = (input / 2 * STEP + W::index_in_step(input % 2, lane)) * size;
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
    use super::*;
    use crate::HostMatrix;

    fn pack(dtype: WeightType, pool: &mut ThreadPool, parts: &[HostMatrix<'_>], paired: bool) -> Matrix {
        Matrix::pack(Form::Stored(dtype), pool, FusedMatrices::new(parts, paired).unwrap()).unwrap()
    }

    #[test]
    fn parts_are_laid_one_below_the_other_in_panels() {
        // 21 outputs by 5 inputs in two parts, element (output, input) = 100 * output + input.
        let values: Vec<f32> = (0..21 * 5).map(|i| (100 * (i / 5) + i % 5) as f32).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let (top, bottom) = bytes.split_at(13 * 5 * 4);
        let part = |bytes, rows| HostMatrix { bytes, dtype: WeightType::F32, rows, columns: 5 };
        let mut pool = ThreadPool::new(2).unwrap();
        let matrix = pack(WeightType::F32, &mut pool, &[part(top, 13), part(bottom, 8)], false);
        let Elements::Stored(Stored::F32(data)) = &matrix.data else { unreachable!() };
        assert_eq!((matrix.shape.panels(), matrix.shape.steps(), data.len()), (2, 3, 2 * 3 * STEP));
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
            let matrix = pack(dtype, &mut pool, &[part], false);
            let (packed, panel) = (matrix.data.bytes(), matrix.shape.steps() * STEP * size);
            assert_eq!(packed.len(), 3 * panel);
            for output in 0..48 {
                for input in 0..58 {
                    let index = match dtype {
                        WeightType::Bf16 => output % 16 * 2 + input % 2,
                        _ => input % 2 * 16 + output % 16,
                    };
                    let got = &packed[output / 16 * panel + (input / 2 * 32 + index) * size..][..size];
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
        let matrix = pack(WeightType::F32, &mut pool, &[part(gate), part(up)], true);
        let Elements::Stored(Stored::F32(data)) = &matrix.data else { unreachable!() };
        assert_eq!((matrix.shape.panels(), data.len()), (4, 4 * STEP));
        let first_of = |panel: usize| [data[panel * STEP], data[panel * STEP + 1]];
        assert_eq!([0, 1, 2, 3].map(first_of), [[1.0, 2.0], [18.0, 19.0], [17.0, 0.0], [34.0, 0.0]]);
    }
}
