//! Lowering of the address operands of instructions.

use crate::program::{Instruction, Space, Width};
use crate::ptx::Operand;

use super::kernel::Lowering;
use super::mnemonic::Mnemonic;
use super::names::Symbol;

/// Removes the state space from a mnemonic and returns it.
pub(super) fn take_space(mnemonic: &mut Mnemonic<'_>) -> Space {
    let spaces = [
        ("global", Space::Global),
        ("const", Space::Global),
        ("shared", Space::Shared),
        ("shared::cta", Space::Shared),
        ("local", Space::Local),
        ("param", Space::Parameter),
        ("param::entry", Space::Parameter),
        ("param::func", Space::Parameter),
    ];
    spaces.iter().find(|(name, _)| mnemonic.take(name)).map_or(Space::Generic, |(_, space)| *space)
}

impl<'a> Lowering<'a> {
    /// Returns the row that holds an address, true if the row's lanes have 64 bits, and the offset.
    pub fn address_of(&mut self, scope: usize, operand: &Operand<'a>) -> Result<(u32, bool, i64), String> {
        let Operand::Address { base, offset } = *operand else {
            return Err(format!("{operand:?} is no address that is supported"));
        };
        if let Some(register) = self.register(scope, base) {
            return match self.widths[register as usize] {
                Width::W32 => Ok((register, false, offset)),
                Width::W64 => Ok((register, true, offset)),
                width => Err(format!("the register `{base}` of {} bits is no address", width.bits())),
            };
        }
        if let Ok(number) = base.parse::<u64>() {
            let row = self.fixed(Width::W64, crate::program::Fill::Constant(number));
            return Ok((row, true, offset));
        }
        let symbol = self.symbol(scope, base)?;
        Ok((self.symbol_row(symbol, Width::W64)?, true, offset))
    }

    /// Sets an instruction's address.
    pub fn set_address(
        &mut self,
        scope: usize,
        draft: &mut Instruction,
        operand: &Operand<'a>,
    ) -> Result<(), String> {
        let (row, wide, offset) = self.address_of(scope, operand)?;
        draft.from[0] = row;
        draft.wide_address = wide;
        draft.offset = offset;
        Ok(())
    }

    /// Returns the symbol and the offset of an address in parameter space, if the address starts with a symbol's name.
    pub fn parameter_symbol(&mut self, scope: usize, operand: &Operand<'a>) -> Option<(Symbol, i64)> {
        let Operand::Address { base, offset } = *operand else { return None };
        if self.register(scope, base).is_some() {
            return None;
        }
        Some((self.symbol(scope, base).ok()?, offset))
    }
}
