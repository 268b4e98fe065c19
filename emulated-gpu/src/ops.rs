//! The functions that run instructions. A function runs one kind of instruction for all lanes of a warp.

pub(crate) mod atomics;
mod bits;
mod convert;
mod float;
mod float8;
mod flow;
mod half;
mod integer;
mod lanes;
pub(crate) mod matrix;
pub(crate) mod memory;
mod moves;
mod packed;
mod rounding;
mod selection;
mod transcendental;
mod votes;

pub(crate) use atomics::atomic;
pub(crate) use convert::{Conversion, Number, conversion};
pub(crate) use float8::{of_floats, of_halves, to_halves};
pub(crate) use flow::{call_outside, clock, fence, nothing, trap};
pub(crate) use lanes::Compute;
pub(crate) use matrix::{Mma, load_matrix, multiply_accumulate};
pub(crate) use memory::{load, store};
pub(crate) use moves::{copy, generic_address, join, split};
pub(crate) use rounding::Rounding;
pub(crate) use selection::{combine, compare};
pub(crate) use votes::{active_mask, match_all, match_any, reduce, shuffle, vote};

use crate::lower::Mnemonic;
use crate::ptx::{Kind, Type};

/// Returns the operation of an arithmetic instruction. Removes from the mnemonic the modifiers that the operation
/// supports.
pub(crate) fn arithmetic(mnemonic: &mut Mnemonic<'_>, ty: Type) -> Option<Compute> {
    match ty.kind {
        Kind::Bits | Kind::Unsigned | Kind::Signed if mnemonic.name == "selp" => selection::select(ty.bits),
        Kind::Float if mnemonic.name == "selp" => selection::select(ty.bits),
        Kind::Bits | Kind::Unsigned | Kind::Signed => {
            integer::operation(mnemonic, ty).or_else(|| bits::operation(mnemonic, ty))
        }
        Kind::Float if ty.bits == 32 && !ty.packed => float::single(mnemonic),
        Kind::Float if ty.bits == 64 => float::double(mnemonic),
        Kind::Float | Kind::Brain => packed::operation(mnemonic, ty),
        Kind::Predicate => selection::logic(mnemonic),
        Kind::Tensor | Kind::E4m3 => None,
    }
}
