//! Arithmetic of f32 and f64.
//!
//! The usual modes (nearest, with or without `.ftz`) have separate functions. All other modes share one function per
//! operation, which reads the mode from `detail`.

use crate::lower::Mnemonic;

use super::lanes::{Compute, binary, compute, ternary, unary};
use super::rounding::{self, Rounding, canonical, flush, saturate};
use super::transcendental::{exp2, log2};

/// Flags in `detail`, above the bits of the rounding mode.
const FLUSH: u32 = 4;
const SATURATE: u32 = 8;

#[inline(always)]
fn enter(x: f32, detail: u32) -> f32 {
    if detail & FLUSH != 0 { flush(x) } else { x }
}

#[inline(always)]
fn leave(x: f32, detail: u32) -> f32 {
    let x = if detail & FLUSH != 0 { flush(x) } else { x };
    canonical(if detail & SATURATE != 0 { saturate(x) } else { x })
}

/// Returns the larger value. Every number counts as larger than NaN, and zero as larger than negative zero.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    let best = if a > b || b.is_nan() { a } else { b };
    if a == b { f32::from_bits(a.to_bits() & b.to_bits()) } else { best }
}

#[inline(always)]
fn smaller(a: f32, b: f32) -> f32 {
    let best = if a < b || b.is_nan() { a } else { b };
    if a == b { f32::from_bits(a.to_bits() | b.to_bits()) } else { best }
}

/// Returns `a / b` as `div.approx` does: zero if the reciprocal of `b` is subnormal.
#[inline(always)]
fn quick_quotient(a: f32, b: f32) -> f32 {
    let large = b.abs() > 8.507_059e37 && b.abs() < f32::INFINITY;
    if !large {
        a / b
    } else if a.abs() < f32::INFINITY {
        f32::from_bits((a.to_bits() ^ b.to_bits()) & 0x8000_0000)
    } else {
        f32::NAN
    }
}

macro_rules! one {
    ($ftz:expr, |$a:ident| $e:expr) => {
        if $ftz {
            unary!(f32 => f32, |a| { let $a = flush(a); canonical(flush($e)) })
        } else {
            unary!(f32 => f32, |$a| canonical($e))
        }
    };
}

macro_rules! two {
    ($ftz:expr, |$a:ident, $b:ident| $e:expr) => {
        if $ftz {
            binary!(f32, f32 => f32, |a, b| { let ($a, $b) = (flush(a), flush(b)); canonical(flush($e)) })
        } else {
            binary!(f32, f32 => f32, |$a, $b| canonical($e))
        }
    };
}

macro_rules! three {
    ($ftz:expr, |$a:ident, $b:ident, $c:ident| $e:expr) => {
        if $ftz {
            ternary!(f32, f32, f32 => f32, |a, b, c| {
                let ($a, $b, $c) = (flush(a), flush(b), flush(c));
                canonical(flush($e))
            })
        } else {
            ternary!(f32, f32, f32 => f32, |$a, $b, $c| canonical($e))
        }
    };
}

/// Modifiers of a floating-point instruction.
struct Modes {
    rounding: Option<Rounding>,
    ftz: bool,
    sat: bool,
    approximate: bool,
}

impl Modes {
    fn take(mnemonic: &mut Mnemonic<'_>) -> Self {
        let rounding = mnemonic.take_any(&["rn", "rz", "rm", "rp"]).map(|i| Rounding::of_bits(i as u32));
        let approximate = mnemonic.take_any(&["approx", "full"]).is_some();
        Modes { rounding, ftz: mnemonic.take("ftz"), sat: mnemonic.take("sat"), approximate }
    }

    fn usual(&self) -> bool {
        !self.sat && matches!(self.rounding, None | Some(Rounding::Nearest))
    }

    fn detail(&self) -> u32 {
        let rounding = self.rounding.unwrap_or_default().bits();
        rounding | if self.ftz { FLUSH } else { 0 } | if self.sat { SATURATE } else { 0 }
    }
}

/// Returns the operation of an f32 instruction.
pub(super) fn single(mnemonic: &mut Mnemonic<'_>) -> Option<Compute> {
    let name = mnemonic.name;
    if matches!(name, "min" | "max") {
        return extremum(mnemonic);
    }
    let modes = Modes::take(mnemonic);
    let ftz = modes.ftz;
    let must_round = matches!(name, "fma" | "mad");
    let can_approximate = matches!(name, "rcp" | "sqrt" | "div");
    if must_round && modes.rounding.is_none()
        || can_approximate && modes.rounding.is_none() != modes.approximate
    {
        return None;
    }
    let only_approximate = matches!(name, "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh");
    if modes.approximate && !can_approximate && !only_approximate || only_approximate && !modes.approximate {
        return None;
    }
    let found = match name {
        "abs" => one!(ftz, |a| a.abs()),
        "neg" => one!(ftz, |a| -a),
        "copysign" => binary!(f32, f32 => f32, |a, b| b.copysign(a)),
        "rsqrt" => one!(ftz, |a| 1.0 / a.sqrt()),
        "ex2" => one!(ftz, |a| exp2(a)),
        "lg2" => one!(ftz, |a| log2(a)),
        "sin" => one!(ftz, |a| a.sin()),
        "cos" => one!(ftz, |a| a.cos()),
        "tanh" => one!(ftz, |a| a.tanh()),
        "div" if modes.approximate => two!(ftz, |a, b| quick_quotient(a, b)),
        _ if modes.usual() => match name {
            "add" => two!(ftz, |a, b| a + b),
            "sub" => two!(ftz, |a, b| a - b),
            "mul" => two!(ftz, |a, b| a * b),
            "div" => two!(ftz, |a, b| a / b),
            "fma" | "mad" => three!(ftz, |a, b, c| a.mul_add(b, c)),
            "rcp" => one!(ftz, |a| 1.0 / a),
            "sqrt" => one!(ftz, |a| a.sqrt()),
            _ => return None,
        },
        _ => return special_modes(name, &modes),
    };
    let plain = only_approximate || matches!(name, "abs" | "neg" | "copysign");
    (!plain || modes.usual() && modes.rounding.is_none()).then_some(found)
}

fn special_modes(name: &str, modes: &Modes) -> Option<Compute> {
    // PTX defines saturation only for sums and products.
    if modes.sat && !matches!(name, "add" | "sub" | "mul" | "fma" | "mad") {
        return None;
    }
    let mut found = match name {
        "add" => compute!(f32; a: f32 = 0, b: f32 = 1; |detail| {
            directed_sum(enter(a, detail), enter(b, detail), detail)
        }),
        "sub" => compute!(f32; a: f32 = 0, b: f32 = 1; |detail| {
            directed_sum(enter(a, detail), -enter(b, detail), detail)
        }),
        "mul" => compute!(f32; a: f32 = 0, b: f32 = 1; |detail| {
            let exact = rounding::product(f64::from(enter(a, detail)), f64::from(enter(b, detail)));
            leave(rounding::to_f32(exact, Rounding::of_bits(detail)), detail)
        }),
        "fma" | "mad" => compute!(f32; a: f32 = 0, b: f32 = 1, c: f32 = 2; |detail| {
            let mode = Rounding::of_bits(detail);
            let exact = rounding::product(f64::from(enter(a, detail)), f64::from(enter(b, detail)));
            let sum = rounding::sum(exact, f64::from(enter(c, detail)), mode);
            leave(rounding::to_f32(sum, mode), detail)
        }),
        "div" => compute!(f32; a: f32 = 0, b: f32 = 1; |detail| {
            let exact = rounding::quotient(f64::from(enter(a, detail)), f64::from(enter(b, detail)));
            leave(rounding::to_f32(exact, Rounding::of_bits(detail)), detail)
        }),
        "rcp" => compute!(f32; a: f32 = 0; |detail| {
            let exact = rounding::quotient(1.0, f64::from(enter(a, detail)));
            leave(rounding::to_f32(exact, Rounding::of_bits(detail)), detail)
        }),
        "sqrt" => compute!(f32; a: f32 = 0; |detail| {
            let exact = rounding::root(f64::from(enter(a, detail)));
            leave(rounding::to_f32(exact, Rounding::of_bits(detail)), detail)
        }),
        _ => return None,
    };
    found.detail = modes.detail();
    Some(found)
}

fn directed_sum(a: f32, b: f32, detail: u32) -> f32 {
    let mode = Rounding::of_bits(detail);
    leave(rounding::to_f32(rounding::sum(f64::from(a), f64::from(b), mode), mode), detail)
}

fn extremum(mnemonic: &mut Mnemonic<'_>) -> Option<Compute> {
    let (ftz, nan) = (mnemonic.take("ftz"), mnemonic.take("NaN"));
    Some(match (mnemonic.name, nan) {
        ("max", false) => two!(ftz, |a, b| larger(a, b)),
        ("min", false) => two!(ftz, |a, b| smaller(a, b)),
        ("max", true) => two!(ftz, |a, b| if a.is_nan() || b.is_nan() { f32::NAN } else { larger(a, b) }),
        _ => two!(ftz, |a, b| if a.is_nan() || b.is_nan() { f32::NAN } else { smaller(a, b) }),
    })
}

/// Returns the operation of an f64 instruction. Only rounding to nearest is supported.
pub(super) fn double(mnemonic: &mut Mnemonic<'_>) -> Option<Compute> {
    let rounded = mnemonic.take("rn");
    Some(match (mnemonic.name, rounded) {
        ("add", _) => binary!(f64, f64 => f64, |a, b| a + b),
        ("sub", _) => binary!(f64, f64 => f64, |a, b| a - b),
        ("mul", _) => binary!(f64, f64 => f64, |a, b| a * b),
        ("fma" | "mad", true) => ternary!(f64, f64, f64 => f64, |a, b, c| a.mul_add(b, c)),
        ("div", true) => binary!(f64, f64 => f64, |a, b| a / b),
        ("rcp", true) => unary!(f64 => f64, |a| 1.0 / a),
        ("sqrt", true) => unary!(f64 => f64, |a| a.sqrt()),
        ("neg", false) => unary!(f64 => f64, |a| -a),
        ("abs", false) => unary!(f64 => f64, |a| a.abs()),
        ("copysign", false) => binary!(f64, f64 => f64, |a, b| b.copysign(a)),
        ("max", false) => binary!(f64, f64 => f64, |a, b| {
            let best = if a > b || b.is_nan() { a } else { b };
            if a == b { f64::from_bits(a.to_bits() & b.to_bits()) } else { best }
        }),
        ("min", false) => binary!(f64, f64 => f64, |a, b| {
            let best = if a < b || b.is_nan() { a } else { b };
            if a == b { f64::from_bits(a.to_bits() | b.to_bits()) } else { best }
        }),
        _ => return None,
    })
}
