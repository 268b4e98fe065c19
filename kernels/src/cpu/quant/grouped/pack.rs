//! Packing of weights that a checkpoint stores quantised.

use super::layout::{GroupedMatrix, LINE};
use super::rows::FusedRows;
use crate::DeviceError;
use crate::cpu::memory::{Buffer, Shared};
use crate::cpu::quant::product::CHUNK;
use crate::cpu::threads::pool::ThreadPool;
use crate::device::{GroupOffsets, QuantizedRows, QuantizedType};

impl GroupedMatrix {
    /// Packs `source`. Allocates nothing but the packed matrix.
    pub(in crate::cpu) fn pack(pool: &mut ThreadPool, source: FusedRows<'_>) -> Result<Self, DeviceError> {
        let FusedRows { shape, layout, .. } = source;
        let mut data = Buffer::zeroed(Self::len(shape, layout), "a weight matrix")?;
        let bytes = layout.panel_bytes(shape.inputs);
        let panels = Shared::new(&mut data[..]);
        pool.run(shape.panels(), |panel, _| {
            // SAFETY: each task accesses only its own panel.
            let to = unsafe { panels.slice_mut(panel * bytes, bytes) };
            for (lane, row) in source.rows(panel).into_iter().enumerate() {
                if let Some((matrix, row)) = row {
                    pack_row(source, (matrix, row), lane, to);
                }
            }
        })?;
        Ok(Self { shape, layout, data })
    }
}

/// Packs one row into one lane of a panel of zeros.
fn pack_row(
    source: FusedRows<'_>,
    (matrix, row): (&QuantizedRows<'_>, usize),
    lane: usize,
    panel: &mut [u8],
) {
    let FusedRows { layout, shape, .. } = source;
    let (codes, bits) = (matrix.row(row), layout.codes.bits());
    for (chunk, to) in panel.chunks_mut(layout.chunk_bytes()).enumerate() {
        let first = chunk * CHUNK;
        let inputs = (shape.inputs - first).min(CHUNK);
        for group in 0..inputs.div_ceil(layout.group) {
            let from = first + group * layout.group;
            let index = matrix.scale_index(row, from);
            let of_group = from..(from + layout.group).min(shape.inputs);
            // The two NaN of e4m3 are not numbers that the product widens, so the scale is NaN instead.
            let is_nan = |input: usize| codes[input] & 0x7f == 0x7f;
            let poisoned = layout.codes == QuantizedType::E4m3 && of_group.into_iter().any(is_nan);
            let scale = if poisoned { f32::NAN } else { matrix.scales[index] };
            layout.store_scale(to, group, lane, scale);
            match matrix.offsets {
                GroupOffsets::None => {}
                GroupOffsets::ZeroPoints(zeros) => to[layout.zeros_at(group) + lane] = zeros[index],
                GroupOffsets::Minima(minima) => layout.store_minimum(to, group, lane, minima[index]),
            }
        }
        let lines = &mut to[layout.header()..];
        if bits == 8 {
            let row = codes[first..first + inputs].chunks(4);
            for (line, row) in lines.chunks_mut(LINE).zip(row) {
                line[lane * 4..][..row.len()].copy_from_slice(row);
            }
            continue;
        }
        let row = codes[first / 2..].chunks(4);
        for (line, row) in lines.chunks_mut(LINE).zip(row) {
            // The row holds codes 0 to 7 in order. Those that pad it are zeros.
            let mut pairs = [0; 4];
            pairs[..row.len()].copy_from_slice(row);
            let code = |index: usize| pairs[index / 2] >> (index % 2 * 4) & 15;
            let to = &mut line[lane * 4..][..4];
            for (index, to) in to.iter_mut().enumerate() {
                *to = code(index) | code(index + 4) << 4;
            }
        }
    }
}
