//! Scopes of names, and the meaning of each name.

use std::collections::HashMap;

use crate::program::{Fill, Special, Width};
use crate::ptx::Operand;

use super::kernel::Lowering;

/// Meaning of a name that stands for memory or a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Symbol {
    /// Offset in shared memory, in bytes.
    Shared(u32),
    /// The shared array whose size is set at the launch. It starts after all other shared variables.
    DynamicShared,
    /// Offset in the thread's local memory, in bytes.
    Local(u32),
    /// Index of a variable of the module.
    Variable(u32),
    /// Offset in the kernel's parameters, in bytes.
    EntryParameter(u32),
    /// Number of a parameter of an inlined call.
    CallParameter(u32),
}

/// Names that a block in braces declares.
#[derive(Default)]
pub(super) struct Scope<'a> {
    pub parent: Option<usize>,
    pub registers: HashMap<&'a str, u32>,
    /// Ranges of registers such as `%r<10>`: the first register and the count, by prefix.
    pub ranges: HashMap<&'a str, (u32, u32)>,
    pub symbols: HashMap<&'a str, Symbol>,
    pub labels: HashMap<&'a str, u32>,
}

/// Splits `%r12` into `%r` and 12.
fn numbered(name: &str) -> Option<(&str, u32)> {
    let digits = name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    Some((&name[..digits], name[digits..].parse().ok()?))
}

/// Returns the special register with a name.
pub(super) fn special(name: &str) -> Option<Special> {
    let axis = |suffix: &str| match suffix {
        "x" => Some(0),
        "y" => Some(1),
        "z" => Some(2),
        _ => None,
    };
    if let Some((register, suffix)) = name.split_once('.') {
        let axis = axis(suffix)?;
        return match register {
            "%tid" => Some(Special::Thread(axis)),
            "%ntid" => Some(Special::Threads(axis)),
            "%ctaid" => Some(Special::Block(axis)),
            "%nctaid" => Some(Special::Blocks(axis)),
            _ => None,
        };
    }
    Some(match name {
        "%laneid" => Special::Lane,
        "%warpid" => Special::Warp,
        "%nwarpid" => Special::Warps,
        "%lanemask_lt" => Special::LanesBelow,
        "%lanemask_le" => Special::LanesUpTo,
        "%lanemask_gt" => Special::LanesAbove,
        "%lanemask_ge" => Special::LanesFrom,
        "%lanemask_eq" => Special::LaneBit,
        "%dynamic_smem_size" => Special::DynamicSharedBytes,
        "%total_smem_size" => Special::TotalSharedBytes,
        _ => return None,
    })
}

impl<'a> Lowering<'a> {
    /// Looks a name up in a scope and in the scopes that enclose it.
    pub fn find<T>(&self, scope: usize, look: impl Fn(&Scope<'a>) -> Option<T>) -> Option<T> {
        let mut at = Some(scope);
        while let Some(index) = at {
            let found = look(&self.scopes[index]);
            if found.is_some() {
                return found;
            }
            at = self.scopes[index].parent;
        }
        None
    }

    /// Returns the register of a name.
    pub fn register(&self, scope: usize, name: &str) -> Option<u32> {
        let split = numbered(name);
        self.find(scope, |s| {
            s.registers.get(name).copied().or_else(|| {
                let (prefix, index) = split?;
                let &(first, count) = s.ranges.get(prefix)?;
                (index < count).then_some(first + index)
            })
        })
    }

    /// Returns the meaning of a name that stands for memory or a parameter.
    pub fn symbol(&mut self, scope: usize, name: &str) -> Result<Symbol, String> {
        if let Some(found) = self.find(scope, |s| s.symbols.get(name).copied()) {
            return Ok(found);
        }
        if let Some(index) = self.variable_names.iter().position(|v| *v == name) {
            return Ok(Symbol::Variable(index as u32));
        }
        let Some(shared) = self.module_shared.iter().find(|v| v.name == name) else {
            return Err(format!("the name `{name}` is not declared"));
        };
        let symbol = if shared.bytes == 0 {
            self.dynamic_align = self.dynamic_align.max(shared.align);
            Symbol::DynamicShared
        } else {
            Symbol::Shared(place(&mut self.program.shared_bytes, shared.bytes, shared.align))
        };
        self.scopes[0].symbols.insert(shared.name, symbol);
        Ok(symbol)
    }

    /// Returns the row that holds the address of a symbol.
    pub fn symbol_row(&mut self, symbol: Symbol, width: Width) -> Result<u32, String> {
        let fill = match symbol {
            Symbol::Shared(offset) | Symbol::Local(offset) | Symbol::EntryParameter(offset) => {
                Fill::Constant(u64::from(offset))
            }
            Symbol::DynamicShared => Fill::DynamicShared,
            Symbol::Variable(index) => Fill::Variable(index),
            Symbol::CallParameter(_) => {
                return Err("the address of a function's parameter is not supported".to_owned());
            }
        };
        Ok(self.fixed(width, fill))
    }

    /// Returns the row of an operand that is read as a value of this width.
    pub fn source(&mut self, scope: usize, operand: &Operand<'a>, width: Width) -> Result<u32, String> {
        match *operand {
            Operand::Number(bits) => {
                let bits = match width {
                    Width::W16 => bits & 0xffff,
                    Width::W32 => bits & 0xffff_ffff,
                    _ => bits,
                };
                Ok(self.fixed(width, Fill::Constant(bits)))
            }
            Operand::Name(name) => {
                if let Some(register) = self.register(scope, name) {
                    return self.checked(register, name, width);
                }
                if let Some(special) = special(name) {
                    return Ok(self.fixed(width, Fill::Special(special)));
                }
                if name == "WARP_SZ" {
                    return Ok(self.fixed(width, Fill::Constant(32)));
                }
                if name.starts_with('%') {
                    return Err(format!("the register `{name}` is not known"));
                }
                let symbol = self.symbol(scope, name)?;
                self.symbol_row(symbol, width)
            }
            ref other => Err(format!("{other:?} is no value")),
        }
    }

    /// Returns the row of an operand that is written. The operand `_` has no row.
    pub fn target(&mut self, scope: usize, operand: &Operand<'a>, width: Width) -> Result<u32, String> {
        match *operand {
            Operand::Name("_") => Ok(crate::program::NONE),
            Operand::Name(name) => match self.register(scope, name) {
                Some(register) => self.checked(register, name, width),
                None => Err(format!("the register `{name}` is not declared")),
            },
            ref other => Err(format!("{other:?} is no register")),
        }
    }

    /// Returns a register that is at least `width` wide.
    pub fn wide_register(
        &mut self,
        scope: usize,
        operand: &Operand<'a>,
        width: Width,
    ) -> Result<u32, String> {
        if let Operand::Name(name) = *operand
            && let Some(register) = self.register(scope, name)
        {
            let own = self.widths[register as usize];
            if own >= width && own != Width::Predicate {
                return Ok(register);
            }
        }
        if *operand == Operand::Name("_") {
            Ok(crate::program::NONE)
        } else {
            self.source(scope, operand, width)
        }
    }

    fn checked(&self, register: u32, name: &str, width: Width) -> Result<u32, String> {
        let own = self.widths[register as usize];
        if own == width {
            return Ok(register);
        }
        Err(format!("the register `{name}` has {} bits, the instruction takes {}", own.bits(), width.bits()))
    }
}

/// Places a variable at the next aligned offset from `top` on, and returns this offset. Moves `top` to the variable's
/// end.
pub(super) fn place(top: &mut u32, bytes: u64, align: u64) -> u32 {
    let at = top.next_multiple_of(align.max(1) as u32);
    *top = at + bytes as u32;
    at
}
