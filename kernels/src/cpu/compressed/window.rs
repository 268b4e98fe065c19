//! Storing of the window's keys in the rings of slots.

use crate::cpu::memory::format::Format;
use crate::cpu::memory::slots::SlotStates;
use crate::cpu::step::Row;
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeviceError, SlotId};

/// Writes the keys of each row's last `window` tokens to the ring in the row's slot. `kv` is `[tokens, head_dim]`.
pub(in crate::cpu) fn store_window<W: Format>(
    pool: &mut ThreadPool,
    rows: &[Row],
    kv: &[f32],
    (head_dim, window): (usize, usize),
    rings: &SlotStates<'_, W::Raw>,
) -> Result<(), DeviceError> {
    pool.run(rows.len(), |row, _| {
        let row = &rows[row];
        if row.slot == SlotId::NULL {
            return;
        }
        for index in row.tokens.saturating_sub(window)..row.tokens {
            let key = &kv[(row.first_token + index) * head_dim..][..head_dim];
            let at = (row.start + index) % window * head_dim;
            // SAFETY: each slot belongs to one row, and so to one task, which holds one slice at a time.
            let ring = unsafe { rings.part(row.slot, at, head_dim) };
            ring.iter_mut().zip(key).for_each(|(to, &x)| *to = W::narrow(x));
        }
    })
}
