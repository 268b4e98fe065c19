//! Lowers instructions that compute each lane separately.

use crate::ops;
use crate::program::{Instruction, Width};
use crate::ptx::{Operand, Type};

use super::kernel::Lowering;
use super::mnemonic::Mnemonic;

impl<'a> Lowering<'a> {
    pub(super) fn arithmetic(
        &mut self,
        scope: usize,
        mut draft: Instruction,
        mnemonic: &mut Mnemonic<'_>,
        operands: &'a [Operand<'a>],
    ) -> Result<(), String> {
        // `nanosleep` is a hint to wait. It has no effect in the emulator.
        if mnemonic.name == "nanosleep" && mnemonic.take("u32") {
            return Ok(());
        }
        let Some(ty) = mnemonic.take_type() else { return mnemonic.unknown() };
        let integer = !matches!(ty.kind, crate::ptx::Kind::Float | crate::ptx::Kind::Brain);
        let Some(compute) = ops::arithmetic(mnemonic, ty) else { return mnemonic.unknown() };
        if integer {
            // Integer operations are looked up by their name with all modifiers, so all modifiers are used.
            mnemonic.take_rest();
        }
        draft.run = compute.run;
        draft.detail = compute.detail;
        let [target, sources @ ..] = operands else { return mnemonic.unknown() };
        let mut sources = sources;
        if mnemonic.name == "lop3" {
            let [values @ .., Operand::Number(table)] = sources else { return mnemonic.unknown() };
            draft.detail = *table as u32;
            sources = values;
        }
        if sources.len() != compute.from.len() {
            let (n, m) = (sources.len(), compute.from.len());
            return Err(format!("`{}` has {n} sources, not {m}", mnemonic.text));
        }
        draft.into[0] = self.target(scope, target, compute.into)?;
        for (index, (source, &width)) in sources.iter().zip(compute.from).enumerate() {
            draft.from[index] = self.source(scope, source, width)?;
        }
        self.emit(draft);
        Ok(())
    }

    /// Lowers `setp`, with or without a third predicate.
    pub(super) fn comparison(
        &mut self,
        scope: usize,
        mut draft: Instruction,
        mnemonic: &mut Mnemonic<'_>,
        operands: &'a [Operand<'a>],
    ) -> Result<(), String> {
        use ops::combine;
        let (Some(ty), Some(name)) = (mnemonic.take_type(), mnemonic.take_first()) else {
            return mnemonic.unknown();
        };
        let ftz = mnemonic.take("ftz");
        let Some(run) = ops::compare(name, ty, ftz) else { return mnemonic.unknown() };
        draft.run = run;
        let combined = mnemonic.take_any(&["and", "or", "xor"]);
        let (target, first, second, third) = match (combined, operands) {
            (None, [target, first, second]) => (target, first, second, None),
            (Some(how), [target, first, second, third]) => (target, first, second, Some((how, third))),
            _ => return mnemonic.unknown(),
        };
        match *target {
            Operand::Pair(yes, no) => {
                draft.into[0] = self.target(scope, &Operand::Name(yes), Width::Predicate)?;
                draft.into[1] = self.target(scope, &Operand::Name(no), Width::Predicate)?;
            }
            ref target => draft.into[0] = self.target(scope, target, Width::Predicate)?,
        }
        let width = Width::of_bits(ty.bits);
        draft.from[0] = self.source(scope, first, width)?;
        draft.from[1] = self.source(scope, second, width)?;
        draft.detail = combine::ALONE;
        if let Some((how, third)) = third {
            let (third, negated) = match third {
                Operand::Not(name) => (&Operand::Name(name), combine::NEGATED),
                third => (third, 0),
            };
            draft.from[2] = self.source(scope, third, Width::Predicate)?;
            draft.detail = [combine::AND, combine::OR, combine::XOR][how] | negated;
        }
        self.emit(draft);
        Ok(())
    }
}

/// Returns the width of registers that hold a type.
pub(super) fn width(ty: Type) -> Width {
    Width::of_bits(ty.bits)
}
