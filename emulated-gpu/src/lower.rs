//! Lowers statements to programs: resolves names, inlines calls and turns registers into rows.

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
