//! Lowers branches, calls, barriers and fences.

use crate::ops;
use crate::program::{Control, Instruction, Width};
use crate::ptx::Operand;

use super::kernel::{Lowering, Within};
use super::mnemonic::Mnemonic;

impl<'a> Lowering<'a> {
    pub(super) fn control(
        &mut self,
        scope: usize,
        mut draft: Instruction,
        mnemonic: &mut Mnemonic<'_>,
        operands: &'a [Operand<'a>],
        within: Within,
    ) -> Result<(), String> {
        match mnemonic.name {
            "bra" => {
                mnemonic.take("uni");
                let [Operand::Name(label)] = operands else { return mnemonic.unknown() };
                draft.control = Control::Branch;
                self.branches.push((self.here() as usize, scope, label));
                self.emit(draft);
            }
            "ret" => {
                mnemonic.take("uni");
                match within {
                    Some(call) => {
                        draft.control = Control::Branch;
                        self.returns.push((self.here() as usize, call));
                    }
                    None => draft.control = Control::Exit,
                }
                self.emit(draft);
            }
            "exit" => {
                draft.control = Control::Exit;
                self.emit(draft);
            }
            "trap" => {
                draft.run = ops::trap;
                self.emit(draft);
            }
            "membar" | "fence" => {
                mnemonic.take_any(&["sc", "acq_rel", "acquire", "release"]);
                if mnemonic.take_any(&["cta", "gl", "gpu", "sys", "cluster"]).is_none() {
                    return mnemonic.unknown();
                }
                draft.run = ops::fence;
                self.emit(draft);
            }
            "call" => self.call(scope, draft, mnemonic, operands)?,
            _ => self.barrier(scope, draft, mnemonic, operands)?,
        }
        Ok(())
    }

    fn barrier(
        &mut self,
        scope: usize,
        mut draft: Instruction,
        mnemonic: &mut Mnemonic<'_>,
        operands: &'a [Operand<'a>],
    ) -> Result<(), String> {
        if mnemonic.take("warp") {
            let (true, [members]) = (mnemonic.take("sync"), operands) else { return mnemonic.unknown() };
            draft.control = Control::WarpBarrier;
            draft.members = self.source(scope, members, Width::W32)?;
            self.emit(draft);
            return Ok(());
        }
        mnemonic.take("cta");
        if !mnemonic.take("sync") {
            return mnemonic.unknown();
        }
        mnemonic.take("aligned");
        match *operands {
            [Operand::Number(barrier @ 0..16)] => {
                draft.control = Control::BlockBarrier;
                draft.detail = barrier as u32;
                self.emit(draft);
                Ok(())
            }
            _ => Err(format!(
                "`{}` with a number of threads or a barrier in a register is not supported",
                mnemonic.text
            )),
        }
    }

    fn call(
        &mut self,
        scope: usize,
        mut draft: Instruction,
        mnemonic: &mut Mnemonic<'_>,
        operands: &'a [Operand<'a>],
    ) -> Result<(), String> {
        mnemonic.take("uni");
        if draft.guard != crate::program::NONE {
            return Err("a call with a guard is not supported".to_owned());
        }
        let none: &'a [Operand<'a>] = &[];
        let (returns, name, arguments) = match operands {
            [Operand::Group(returns), Operand::Name(name), Operand::Group(arguments)] => {
                (&returns[..], *name, &arguments[..])
            }
            [Operand::Name(name), Operand::Group(arguments)] => (none, *name, &arguments[..]),
            [Operand::Group(returns), Operand::Name(name)] => (&returns[..], *name, none),
            [Operand::Name(name)] => (none, *name, none),
            _ => return Err("an indirect call is not supported".to_owned()),
        };
        if name == "__assertfail" {
            draft.run = ops::call_outside;
            self.emit(draft);
            return Ok(());
        }
        let text = self.text;
        // A function may be declared before it is defined, so only a function with a body counts.
        let named = || text.functions.iter().filter(|f| f.name == name);
        let Some(function) = named().find(|f| f.body.is_some()) else {
            return Err(format!("the function `{name}` is not in this module"));
        };
        self.inline(scope, function, &[(arguments, &function.parameters), (returns, &function.returns)])
    }
}
