//! PTX text to statements. Names are not resolved here, and instructions are not looked into.

mod body;
mod parser;
mod syntax;
mod token;
mod types;

pub(crate) use parser::parse;
pub(crate) use syntax::{Function, Operand, Source, Statement, Step, Text, VariableText};
pub(crate) use types::{Kind, Type};
