//! Fills fixed rows, which hold constants, special registers and parameters.

use crate::program::{Fill, Special, Width};

use super::Warp;

impl Warp<'_> {
    /// Fills a row of the warp's register file.
    ///
    /// # Safety
    ///
    /// The row at `offset` has the width `width`.
    pub unsafe fn fill_row(&mut self, offset: u32, width: Width, fill: Fill) {
        let values = match fill {
            Fill::Constant(value) => [value; 32],
            Fill::DynamicShared => [0; 32],
            Fill::Variable(index) => [self.run.variables.get(index as usize).copied().unwrap_or(0); 32],
            Fill::Parameter { offset, bytes, signed } => [self.parameter(offset, bytes, signed); 32],
            Fill::Special(special) => {
                std::array::from_fn(|lane| u64::from(self.special(special, lane as u32)))
            }
        };
        // SAFETY: the caller promises that the row at `offset` has the width `width`.
        unsafe {
            match width {
                Width::Predicate => {
                    *self.row::<u32>(offset) = if values[0] != 0 { u32::MAX } else { 0 };
                }
                Width::W16 => (0..32).for_each(|l| *self.row::<u16>(offset).add(l) = values[l] as u16),
                Width::W32 => (0..32).for_each(|l| *self.row::<u32>(offset).add(l) = values[l] as u32),
                Width::W64 => (0..32).for_each(|l| *self.row::<u64>(offset).add(l) = values[l]),
            }
        }
    }

    fn parameter(&self, offset: u32, bytes: u32, signed: bool) -> u64 {
        let mut value = [0; 8];
        let (offset, bytes) = (offset as usize, bytes as usize);
        if let Some(source) = self.run.parameters.get(offset..offset + bytes) {
            value[..bytes].copy_from_slice(source);
        }
        let value = u64::from_le_bytes(value);
        let shift = 64 - 8 * bytes as u32;
        if signed { ((value << shift) as i64 >> shift) as u64 } else { value }
    }

    fn special(&self, special: Special, lane: u32) -> u32 {
        let grid = &self.run.grid;
        let [x, y, _] = grid.threads;
        let thread = self.index * 32 + lane;
        match special {
            Special::Thread(0) => thread % x,
            Special::Thread(1) => thread / x % y,
            Special::Thread(_) => thread / x / y,
            Special::Threads(axis) => grid.threads[usize::from(axis)],
            Special::Block(axis) => self.block[usize::from(axis)],
            Special::Blocks(axis) => grid.blocks[usize::from(axis)],
            Special::Lane => lane,
            Special::Warp => self.index,
            Special::Warps => grid.threads_per_block().div_ceil(32) as u32,
            Special::LaneBit => 1 << lane,
            Special::LanesBelow => (1 << lane) - 1,
            Special::LanesUpTo => u32::MAX >> (31 - lane),
            Special::LanesAbove => !(u32::MAX >> (31 - lane)),
            Special::LanesFrom => u32::MAX << lane,
            Special::DynamicSharedBytes => grid.dynamic_shared_bytes,
            Special::TotalSharedBytes => self.shared_bytes,
        }
    }
}
