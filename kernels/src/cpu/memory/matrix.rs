//! Weight matrices that are not quantised, packed into panels when they are loaded.

use std::fs::File;
use std::mem::discriminant;

use crate::cpu::memory::Buffer;
use crate::cpu::memory::format::{Bf16, F16, F32, Format, STEP, Stored};
use crate::cpu::memory::fused_matrices::{FusedMatrices, Shape};
use crate::cpu::quant::block_float::{BlockFloatPanels, Corrections};
use crate::cpu::quant::int8::Screen;
use crate::cpu::simd::LANES;
use crate::cpu::simd::isa::Path;
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeviceError, WeightType};

/// A weight matrix as `[outputs / 16]` panels of `[inputs / 2]` steps (see [`super::format`]). Outputs that pad the
/// last panel and inputs that pad the last step are zeros.
pub struct Matrix {
    pub(in crate::cpu) shape: Shape,
    pub(in crate::cpu) data: Elements,
    /// The screen (int8 copy) of an LM head, if the head has one.
    pub(in crate::cpu) screen: Option<Box<Screen>>,
    /// The exact values of the weights that block floating point rounds, for an LM head that is also the table of
    /// embeddings.
    pub(in crate::cpu) corrections: Option<Box<Corrections>>,
}

/// The elements of a matrix.
pub(in crate::cpu) enum Elements {
    /// Elements in the checkpoint's type.
    Stored(Stored),
    /// Elements that were bfloat16, converted to block floating point.
    BlockFloat(BlockFloatPanels),
}

impl Elements {
    /// True if the elements of both matrices have the same form.
    pub(in crate::cpu) fn is_like(&self, other: &Self) -> bool {
        let form = |elements: &Self| match elements {
            Self::Stored(stored) => Some(discriminant(stored)),
            Self::BlockFloat(_) => None,
        };
        form(self) == form(other)
    }

    /// The bytes of the elements in memory.
    pub(in crate::cpu) fn bytes(&self) -> &[u8] {
        match self {
            Self::Stored(data) => data.bytes(),
            Self::BlockFloat(data) => data.bytes(),
        }
    }
}

impl Matrix {
    /// Size in bytes of a packed matrix; `None` if it overflows.
    pub(in crate::cpu) fn len(shape: Shape, form: Form) -> Option<usize> {
        match form {
            Form::Stored(dtype) => elements(shape)?.checked_mul(dtype.bytes()),
            Form::BlockFloat => BlockFloatPanels::len(shape)?.checked_mul(size_of::<u16>()),
        }
    }

    /// Packs `source` in the given form. Allocates nothing but the packed matrix.
    pub(in crate::cpu) fn pack(
        form: Form,
        pool: &mut ThreadPool,
        source: FusedMatrices<'_>,
    ) -> Result<Self, DeviceError> {
        let data = match form {
            Form::Stored(dtype) => Elements::Stored(pack_stored(dtype, pool, source)?),
            Form::BlockFloat => Elements::BlockFloat(BlockFloatPanels::pack(pool, source)?),
        };
        Ok(Self { shape: source.shape, data, screen: None, corrections: None })
    }

    /// Maps a packed matrix: the [`Self::len`] bytes of `file` from `from` on.
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
        Ok(Self { shape, data, screen: None, corrections: None })
    }

    /// Size in bytes of the screen; 0 if there is none.
    pub(in crate::cpu) fn screen_bytes(&self) -> usize {
        self.screen.as_ref().map_or(0, |screen| screen.bytes())
    }

    /// Size in bytes of the corrections; 0 if there are none.
    pub(in crate::cpu) fn corrections_bytes(&self) -> usize {
        self.corrections.as_ref().map_or(0, |corrections| corrections.bytes())
    }
}

/// The packed form of a checkpoint's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) enum Form {
    /// Elements of the checkpoint's type.
    Stored(WeightType),
    /// Block floating point: see [`crate::cpu::quant::block_float`].
    BlockFloat,
}

impl Form {
    /// Returns the form of weights of type `dtype` for matrix products on an instruction path. A table that is only
    /// used for look-ups has the form [`Form::Stored`] on every path.
    pub(in crate::cpu) fn of(dtype: WeightType, path: Path) -> Self {
        match dtype {
            WeightType::Bf16 if !path.dots_bf16() => Self::BlockFloat,
            _ => Self::Stored(dtype),
        }
    }
}

/// Number of elements of a matrix in the form [`Form::Stored`]; `None` if it overflows.
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

// Checkpoints are little-endian and their elements are copied unchanged, so the machine must be little-endian too.
const _: () = assert!(cfg!(target_endian = "little"), "weights are packed on little-endian machines only");

/// Fills a zeroed panel with the bytes of sixteen outputs. The lanes of missing outputs stay zero.
fn pack_panel<W: Format>(rows: &[Option<&[u8]>; LANES], inputs: usize, panel: &mut [u8]) {
    let size = size_of::<W::Raw>();
    let whole = rows.map(Option::unwrap_or_default);
    let packed = match rows.iter().all(Option::is_some) {
        // In this format, an output's two inputs are adjacent in a step, so they are packed as one unit of four bytes.
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

/// Packs all whole blocks of sixteen units by sixteen rows. A unit is `UNIT` bytes of a row. Returns the number of
/// bytes of each row that these blocks cover. Blocks are transposed one at a time, so that the panel is written in
/// order while each row is read a cache line at a time.
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
