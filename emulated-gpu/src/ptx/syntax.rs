//! Statements of PTX.

use crate::DecodeError;

use super::Type;

/// Operand of an instruction, as in the PTX text.
#[derive(Clone, Debug, PartialEq)]
pub enum Operand<'a> {
    Name(&'a str),
    /// An operand such as `!%p1`.
    Not(&'a str),
    /// Bits of a number. A negative number is its two's complement in 64 bits.
    Number(u64),
    /// An operand such as `[%rd1+16]`.
    Address {
        base: &'a str,
        offset: i64,
    },
    /// An operand such as `{%r1, %r2}`.
    List(Vec<Operand<'a>>),
    /// An operand such as `(%r1, %r2)`.
    Group(Vec<Operand<'a>>),
    /// An operand such as `%r1|%p1`.
    Pair(&'a str, &'a str),
    /// An address with several parts. Only unsupported instructions have such operands.
    Other,
}

/// Position in the PTX text and, if `.loc` names it, in the kernel's source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Source {
    pub ptx_line: u32,
    pub file: u32,
    pub line: u32,
}

/// An instruction.
#[derive(Clone, Debug)]
pub struct Step<'a> {
    /// Name of the guard predicate, and true if the predicate is negated.
    pub guard: Option<(&'a str, bool)>,
    pub mnemonic: &'a str,
    pub operands: Vec<Operand<'a>>,
    pub source: Source,
}

/// A variable's declaration.
#[derive(Clone, Debug)]
pub struct VariableText<'a> {
    pub name: &'a str,
    /// State space with its dot: `.shared`.
    pub space: &'a str,
    pub align: u64,
    /// Size in bytes; 0 for an array without a size.
    pub bytes: u64,
    pub initial: Vec<u8>,
}

/// Statement in the body of a function.
#[derive(Clone, Debug)]
pub enum Statement<'a> {
    /// Registers of a type. `count` is set if several registers are declared, as in `%r<10>`.
    Registers {
        ty: Type,
        name: &'a str,
        count: Option<u32>,
    },
    Variable(VariableText<'a>),
    Label(&'a str),
    Open,
    Close,
    Step(Step<'a>),
}

/// A kernel or a function.
#[derive(Clone, Debug, Default)]
pub struct Function<'a> {
    pub name: &'a str,
    pub is_kernel: bool,
    pub returns: Vec<VariableText<'a>>,
    pub parameters: Vec<VariableText<'a>>,
    pub max_threads: Option<u32>,
    /// The statements; none if the function is only declared.
    pub body: Option<Vec<Statement<'a>>>,
    /// First error in the body; none if the body could be parsed.
    pub error: Option<DecodeError>,
}

/// The text of a module.
#[derive(Debug, Default)]
pub struct Text<'a> {
    pub functions: Vec<Function<'a>>,
    pub variables: Vec<VariableText<'a>>,
    /// Numbers and names of the source files that `.loc` refers to.
    pub files: Vec<(u32, String)>,
}
