//! Parses PTX text to statements. Does not resolve names or check opcodes.

mod body;
mod parser;
mod syntax;
mod token;
mod types;

pub(crate) use parser::parse;
pub(crate) use syntax::{Function, Operand, Source, Statement, Step, Text, VariableText};
pub(crate) use types::{Kind, Type};
