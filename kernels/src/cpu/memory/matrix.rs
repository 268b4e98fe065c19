//! Weight matrices, repacked into panels once when they are loaded.

use std::fs::File;

use crate::cpu::memory::Buffer;
use crate::cpu::memory::format::{Bf16, F16, F32, Format, STEP, Stored};
use crate::cpu::memory::fused_matrices::{FusedMatrices, Shape};
use crate::cpu::quant::block_float::BlockFloatPanels;
use crate::cpu::simd::LANES;
use crate::cpu::simd::isa::Path;
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeviceError, WeightType};

/// A weight matrix as `[outputs / 16]` panels of `[inputs / 2]` steps (see [`crate::cpu::memory::format`]); outputs and inputs that
/// fill up the last panel and step are zeros.
pub struct Matrix {
    pub(in crate::cpu) shape: Shape,
    pub(in crate::cpu) data: Elements,
}

/// The elements of a matrix.
pub(in crate::cpu) enum Elements {
    /// In the type of the checkpoint.
    Stored(Stored),
    /// bfloat16 in another form.
    BlockFloat(BlockFloatPanels),
}

impl Elements {
    /// As they lie in memory.
    pub(in crate::cpu) fn bytes(&self) -> &[u8] {
        match self {
            Self::Stored(data) => data.bytes(),
            Self::BlockFloat(data) => data.bytes(),
        }
    }
}

impl Matrix {
    /// Bytes of such a matrix, packed. `None` where there is no number for them.
    pub(in crate::cpu) fn len(shape: Shape, form: Form) -> Option<usize> {
        match form {
            Form::Stored(dtype) => elements(shape)?.checked_mul(dtype.bytes()),
            Form::BlockFloat => BlockFloatPanels::len(shape)?.checked_mul(size_of::<u16>()),
        }
    }

    /// Packs `parts`, as they are or as block floats of them. Beside the packed matrix nothing is allocated.
    pub(in crate::cpu) fn pack(
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
    pub(in crate::cpu) fn mapped(
        file: &File,
        from: u64,
        shape: Shape,
        form: Form,
    ) -> Result<Self, DeviceError> {
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
pub(in crate::cpu) enum Form {
    /// They stay what they are.
    Stored(WeightType),
    /// See [`crate::cpu::quant::block_float`].
    BlockFloat,
}

impl Form {
    /// The form of weights of this type that suits a path's instructions.
    pub(in crate::cpu) fn of(dtype: WeightType, path: Path) -> Self {
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
mod tests;
