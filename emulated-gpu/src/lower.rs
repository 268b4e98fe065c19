//! Statements to programs: names are resolved, calls are inlined, registers become rows.

mod addresses;
mod arithmetic;
mod control;
mod conversions;
mod kernel;
mod memory;
mod mnemonic;
mod names;
mod registers;
mod warps;

pub(crate) use kernel::{lower, parameters};
pub(crate) use mnemonic::Mnemonic;
