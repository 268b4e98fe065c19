//! Lowers the instructions of a whole warp.

use crate::ops::{self, Mma};
use crate::program::{Control, Instruction, NONE, Width};
use crate::ptx::Operand;

use super::kernel::Lowering;
use super::mnemonic::Mnemonic;

impl<'a> Lowering<'a> {
    pub(super) fn warp_wide(
        &mut self,
        scope: usize,
        mut draft: Instruction,
        mnemonic: &mut Mnemonic<'_>,
        operands: &'a [Operand<'a>],
    ) -> Result<(), String> {
        if mnemonic.name == "mma" {
            return self.multiply(scope, draft, mnemonic, operands);
        }
        let Some(ty) = mnemonic.take_type() else { return mnemonic.unknown() };
        if mnemonic.name == "activemask" {
            let [target] = operands else { return mnemonic.unknown() };
            draft.into[0] = self.target(scope, target, Width::W32)?;
            draft.run = ops::active_mask;
            self.emit(draft);
            return Ok(());
        }
        if !mnemonic.take("sync") {
            return mnemonic.unknown();
        }
        draft.control = Control::Converged;
        match (mnemonic.name, operands) {
            ("shfl", [target, value, operand, bounds, members]) if ty.bits == 32 => {
                let Some(mode) = mnemonic.take_any(&["idx", "up", "down", "bfly"]) else {
                    return mnemonic.unknown();
                };
                self.result_and_predicate(scope, &mut draft, target)?;
                for (index, source) in [value, operand, bounds].into_iter().enumerate() {
                    draft.from[index] = self.source(scope, source, Width::W32)?;
                }
                draft.members = self.source(scope, members, Width::W32)?;
                draft.run = ops::shuffle(mode as u32);
            }
            ("vote", [target, value, members]) => {
                let Some(mode) = mnemonic.take_any(&["ballot", "any", "all", "uni"]) else {
                    return mnemonic.unknown();
                };
                let width = if mode == 0 { Width::W32 } else { Width::Predicate };
                draft.into[0] = self.target(scope, target, width)?;
                let (value, negated) = match value {
                    Operand::Not(name) => (&Operand::Name(name), 4),
                    value => (value, 0),
                };
                draft.from[0] = self.source(scope, value, Width::Predicate)?;
                draft.detail = mode as u32 | negated;
                draft.members = self.source(scope, members, Width::W32)?;
                draft.run = ops::vote;
            }
            ("match", [target, value, members]) => {
                let all = mnemonic.take("all");
                if !all && !mnemonic.take("any") {
                    return mnemonic.unknown();
                }
                self.result_and_predicate(scope, &mut draft, target)?;
                draft.from[0] = self.source(scope, value, Width::of_bits(ty.bits))?;
                draft.detail = u32::from(all);
                draft.members = self.source(scope, members, Width::W32)?;
                draft.run = if all { ops::match_all(ty.bits) } else { ops::match_any(ty.bits) };
            }
            ("redux", [target, value, members]) if ty.bits == 32 => {
                let Some(what) = mnemonic.take_any(&["add", "min", "max", "and", "or", "xor"]) else {
                    return mnemonic.unknown();
                };
                let signed = ty.kind == crate::ptx::Kind::Signed && matches!(what, 1 | 2);
                draft.detail = what as u32 | if signed { 8 } else { 0 };
                draft.into[0] = self.target(scope, target, Width::W32)?;
                draft.from[0] = self.source(scope, value, Width::W32)?;
                draft.members = self.source(scope, members, Width::W32)?;
                draft.run = ops::reduce;
            }
            _ => return mnemonic.unknown(),
        }
        self.emit(draft);
        Ok(())
    }

    /// Returns the rows of a 32-bit target, alone or together with a predicate, as in `%r1|%p1`.
    fn result_and_predicate(
        &mut self,
        scope: usize,
        draft: &mut Instruction,
        target: &Operand<'a>,
    ) -> Result<(), String> {
        match *target {
            Operand::Pair(result, predicate) => {
                draft.into[0] = self.target(scope, &Operand::Name(result), Width::W32)?;
                draft.into[1] = self.target(scope, &Operand::Name(predicate), Width::Predicate)?;
            }
            ref result => draft.into[0] = self.target(scope, result, Width::W32)?,
        }
        Ok(())
    }

    fn multiply(
        &mut self,
        scope: usize,
        mut draft: Instruction,
        mnemonic: &mut Mnemonic<'_>,
        operands: &'a [Operand<'a>],
    ) -> Result<(), String> {
        let shape = match mnemonic.rest().as_str() {
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" => Mma::Brain16,
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" => Mma::Half16,
            "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32" => Mma::Brain8,
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32" => Mma::Half8,
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32" => Mma::Tensor8,
            _ => return mnemonic.unknown(),
        };
        mnemonic.take_rest();
        let (a, b) = shape.registers();
        let [Operand::List(into), rest @ ..] = operands else { return mnemonic.unknown() };
        let mut targets = Vec::new();
        for target in into {
            targets.push(self.target(scope, target, Width::W32)?);
        }
        let (mut sources, mut counts) = (Vec::new(), Vec::new());
        for list in rest {
            // A single register may be written without braces.
            let list = match list {
                Operand::List(list) => &list[..],
                one => std::slice::from_ref(one),
            };
            counts.push(list.len());
            for source in list {
                sources.push(self.source(scope, source, Width::W32)?);
            }
        }
        if counts != [a, b, 4] || targets.len() != 4 || targets.contains(&NONE) {
            return Err(format!("`{}` has fragments of {counts:?} registers", mnemonic.text));
        }
        draft.control = Control::Converged;
        draft.run = ops::multiply_accumulate(shape);
        self.emit_list(draft, &targets, &sources);
        Ok(())
    }
}
