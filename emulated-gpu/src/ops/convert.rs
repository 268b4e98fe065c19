//! The instruction `cvt`, which converts between number formats.

use crate::exec::{Row, Warp, each_lane};
use crate::program::{Instruction, Operation, Width};
use crate::ptx::{Kind, Type};

use super::half::{Binary16, Brain, Half};
use super::lanes::{Compute, binary, unary};
use super::rounding::{self, Rounding, canonical, flush, saturate};

/// A number format of `cvt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Number {
    Unsigned(u32),
    Signed(u32),
    F16,
    Bf16,
    F32,
    F64,
    Tf32,
}

impl Number {
    pub fn of(ty: Type) -> Option<Self> {
        Some(match (ty.kind, ty.bits, ty.packed) {
            (Kind::Unsigned, bits @ 8..=64, false) => Number::Unsigned(bits),
            (Kind::Signed, bits @ 8..=64, false) => Number::Signed(bits),
            (Kind::Float, 16, false) | (Kind::Float, 32, true) => Number::F16,
            (Kind::Brain, ..) => Number::Bf16,
            (Kind::Float, 32, false) => Number::F32,
            (Kind::Float, 64, false) => Number::F64,
            (Kind::Tensor, ..) => Number::Tf32,
            _ => return None,
        })
    }

    pub fn bits(self) -> u32 {
        match self {
            Number::Unsigned(bits) | Number::Signed(bits) => bits,
            Number::F16 | Number::Bf16 => 16,
            Number::F32 | Number::Tf32 => 32,
            Number::F64 => 64,
        }
    }

    pub fn is_integer(self) -> bool {
        matches!(self, Number::Unsigned(_) | Number::Signed(_))
    }

    fn code(self) -> u32 {
        match self {
            Number::Unsigned(bits) => bits.trailing_zeros() - 3,
            Number::Signed(bits) => bits.trailing_zeros() + 1,
            Number::F16 => 8,
            Number::Bf16 => 9,
            Number::F32 => 10,
            Number::F64 => 11,
            Number::Tf32 => 12,
        }
    }

    fn of_code(code: u32) -> Self {
        match code & 15 {
            n @ 0..4 => Number::Unsigned(8 << n),
            n @ 4..8 => Number::Signed(8 << (n - 4)),
            8 => Number::F16,
            9 => Number::Bf16,
            10 => Number::F32,
            11 => Number::F64,
            _ => Number::Tf32,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Conversion {
    pub into: Number,
    pub from: Number,
    pub rounding: Rounding,
    /// True to round a float to an integral value (`.rni` and similar modifiers).
    pub integral: bool,
    /// True to round ties away from zero (`.rna`, for tf32).
    pub away: bool,
    pub ftz: bool,
    pub sat: bool,
    pub relu: bool,
    /// True if two sources are converted to one packed target.
    pub packed: bool,
}

impl Conversion {
    fn pack(self) -> u32 {
        let flags = [self.integral, self.away, self.ftz, self.sat, self.relu];
        let flags = flags.iter().enumerate().map(|(i, &f)| u32::from(f) << i).sum::<u32>();
        self.into.code() | self.from.code() << 4 | self.rounding.bits() << 8 | flags << 10
    }

    fn unpack(detail: u32) -> Self {
        let flag = |i: u32| detail >> (10 + i) & 1 != 0;
        Conversion {
            into: Number::of_code(detail),
            from: Number::of_code(detail >> 4),
            rounding: Rounding::of_bits(detail >> 8),
            integral: flag(0),
            away: flag(1),
            ftz: flag(2),
            sat: flag(3),
            relu: flag(4),
            packed: false,
        }
    }
}

/// Returns the operation of a conversion from a register of the width `from` to a register of the width `into`.
pub(crate) fn conversion(plan: Conversion, into: Width, from: Width) -> Compute {
    if plan.packed {
        let mut found =
            binary!(f32, f32 => u32, |a, b| u32::from(Brain::narrow(a)) << 16 | u32::from(Brain::narrow(b)));
        let usual = plan.rounding == Rounding::Nearest && !plan.relu;
        if plan.into == Number::F16 && usual {
            found = binary!(f32, f32 => u32, |a, b| u32::from(Binary16::narrow(a)) << 16 | u32::from(Binary16::narrow(b)));
        } else if !usual {
            found.run = general_pair;
        }
        found.detail = plan.pack();
        return found;
    }
    let exact = Width::of_bits(plan.into.bits()) == into && Width::of_bits(plan.from.bits()) == from;
    let plain = exact && !plan.ftz && !plan.sat && !plan.relu && !plan.integral && !plan.away;
    if plain && let Some(found) = quick(plan) {
        return found;
    }
    let widths: &'static [Width] = match from {
        Width::Predicate => &[],
        Width::W16 => &[Width::W16],
        Width::W32 => &[Width::W32],
        Width::W64 => &[Width::W64],
    };
    // Packs the plan and, above its bits, the widths of both registers.
    let detail = plan.pack() | into.bits() << 16 | from.bits() << 24;
    Compute { run: general as Operation, into, from: widths, detail }
}

/// Returns a fast operation for a conversion that is frequent in the loops of kernels.
fn quick(plan: Conversion) -> Option<Compute> {
    use Number::{Bf16, F16, F32, Signed, Unsigned};
    let nearest = plan.rounding == Rounding::Nearest;
    Some(match (plan.into, plan.from) {
        (Unsigned(64) | Signed(64), Unsigned(32)) => unary!(u32 => u64, |a| u64::from(a)),
        (Unsigned(64) | Signed(64), Signed(32)) => unary!(i32 => i64, |a| i64::from(a)),
        (Unsigned(32) | Signed(32), Unsigned(64) | Signed(64)) => unary!(u64 => u32, |a| a as u32),
        (Unsigned(32) | Signed(32), Unsigned(16)) => unary!(u16 => u32, |a| u32::from(a)),
        (Unsigned(16) | Signed(16), Unsigned(32) | Signed(32)) => unary!(u32 => u16, |a| a as u16),
        (F32, Signed(32)) if nearest => unary!(i32 => f32, |a| a as f32),
        (F32, Unsigned(32)) if nearest => unary!(u32 => f32, |a| a as f32),
        (Signed(32), F32) if plan.rounding == Rounding::Zero => unary!(f32 => i32, |a| a as i32),
        (Bf16, F32) if nearest => unary!(f32 => u16, |a| Brain::narrow(a)),
        (F16, F32) if nearest => unary!(f32 => u16, |a| Binary16::narrow(a)),
        (F32, Bf16) => unary!(u16 => f32, |a| canonical(Brain::widen(a))),
        (F32, F16) => unary!(u16 => f32, |a| canonical(Binary16::widen(a))),
        _ => return None,
    })
}

fn integral(x: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest => x.round_ties_even(),
        Rounding::Zero => x.trunc(),
        Rounding::Down => x.floor(),
        Rounding::Up => x.ceil(),
    }
}

/// Converts an integer to f64, rounded to odd (see `rounding`), so that a later rounding to a narrower type is correct.
fn integer_to_f64(value: i128) -> f64 {
    let nearest = value as f64;
    let error = value - nearest as i128;
    if error == 0 || nearest.to_bits() & 1 == 1 {
        nearest
    } else if error > 0 {
        nearest.next_up()
    } else {
        nearest.next_down()
    }
}

fn to_integer(x: f64, plan: Conversion) -> u64 {
    let (low, high) = limits(plan.into);
    if x.is_nan() {
        // PTX defines the result of NaN as zero, unless the source or the target has 64 bits.
        let wide = plan.from == Number::F64 || plan.into.bits() == 64;
        return if wide { 1 << (plan.into.bits() - 1) } else { 0 };
    }
    let whole = integral(x, plan.rounding);
    (if whole <= low as f64 {
        low
    } else if whole >= high as f64 {
        high
    } else {
        whole as i128
    }) as u64
}

fn limits(number: Number) -> (i128, i128) {
    match number {
        Number::Signed(bits) => (-(1 << (bits - 1)), (1 << (bits - 1)) - 1),
        other => (0, (1 << other.bits()) - 1),
    }
}

fn to_single(x: f64, plan: Conversion) -> f32 {
    let mut value = rounding::to_f32(x, plan.rounding);
    if plan.ftz {
        value = flush(value);
    }
    if plan.sat { saturate(value) } else { value }
}

fn to_half<H: Half>(x: f64, plan: Conversion) -> u64 {
    let x = if plan.sat { f64::from(saturate(rounding::to_odd_f32(x))) } else { x };
    let bits = H::round(rounding::to_odd_f32(x), plan.rounding);
    u64::from(if plan.relu && bits & 0x8000 != 0 { 0 } else { bits })
}

/// Rounds to tf32: ten bits of mantissa, and zeros in the lower bits.
fn to_tensor(x: f64, plan: Conversion) -> u32 {
    let bits = rounding::to_odd_f32(x).to_bits();
    let value = if bits & 0x7fff_ffff >= 0x7f80_0000 {
        bits
    } else {
        let half = match (plan.away, plan.rounding) {
            (true, _) => 0x1000,
            (false, Rounding::Nearest) => 0xfff + (bits >> 13 & 1),
            _ => 0,
        };
        (bits + half) & 0xffff_e000
    };
    if plan.relu && value >> 31 != 0 { 0 } else { value }
}

fn convert(bits: u64, plan: Conversion) -> u64 {
    let (into, from) = (plan.into, plan.from);
    let shift = 64 - from.bits();
    let integer = match from {
        Number::Signed(_) => i128::from((bits << shift) as i64 >> shift),
        _ => i128::from(bits << shift >> shift),
    };
    if from.is_integer() && into.is_integer() {
        let (low, high) = limits(into);
        return if plan.sat { integer.clamp(low, high) as u64 } else { integer as u64 };
    }
    let single = |x: f32| f64::from(if plan.ftz { flush(x) } else { x });
    let value = match from {
        Number::F16 => single(Binary16::widen(bits as u16)),
        Number::Bf16 => single(Brain::widen(bits as u16)),
        Number::F32 | Number::Tf32 => single(f32::from_bits(bits as u32)),
        Number::F64 => f64::from_bits(bits),
        _ => integer_to_f64(integer),
    };
    let value = if plan.integral && !into.is_integer() { integral(value, plan.rounding) } else { value };
    match into {
        Number::Unsigned(_) | Number::Signed(_) => to_integer(value, plan),
        Number::F16 => to_half::<Binary16>(value, plan),
        Number::Bf16 => to_half::<Brain>(value, plan),
        Number::Tf32 => u64::from(to_tensor(value, plan)),
        Number::F32 => u64::from(to_single(value, plan).to_bits()),
        // f64 represents all sources exactly, except 64-bit integers. `general` rounds those.
        Number::F64 if plan.sat => f64::from(saturate(value as f32)).to_bits(),
        Number::F64 if from.is_integer() => (integer as f64).to_bits(),
        Number::F64 => value.to_bits(),
    }
}

/// Runs a conversion of one source, lane by lane. Supports all conversions that have no fast path.
unsafe fn general(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
    let plan = Conversion::unpack(instruction.detail);
    let (into, from) = (instruction.detail >> 16 & 127, instruction.detail >> 24 & 127);
    let mut values = [0; 32];
    // SAFETY: the rows have the widths that `conversion` packed.
    unsafe {
        each_lane(mask, |lane| {
            values[lane] = match from {
                16 => u64::from(*warp.row::<u16>(instruction.from[0]).add(lane)),
                32 => u64::from(*warp.row::<u32>(instruction.from[0]).add(lane)),
                _ => *warp.row::<u64>(instruction.from[0]).add(lane),
            };
        });
        each_lane(mask, |lane| {
            let mut value = convert(values[lane], plan);
            // If the register is wider than the type, the value is extended to the register's width.
            let shift = 64 - plan.into.bits();
            value = match plan.into {
                Number::Signed(_) => ((value << shift) as i64 >> shift) as u64,
                _ => value << shift >> shift,
            };
            match into {
                16 => *warp.row::<u16>(instruction.into[0]).add(lane) = value as u16,
                32 => *warp.row::<u32>(instruction.into[0]).add(lane) = value as u32,
                _ => *warp.row::<u64>(instruction.into[0]).add(lane) = value,
            }
        });
    }
}

/// Runs a conversion of two f32 to a pair of 16-bit floats. The first source becomes the upper one.
unsafe fn general_pair(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
    let plan = Conversion::unpack(instruction.detail);
    let mut result = Row::<u32>::zero();
    // SAFETY: the lowering chose two sources and a target of 32 bits.
    unsafe {
        let (high, low) = (warp.get::<u32>(instruction.from[0]), warp.get::<u32>(instruction.from[1]));
        for lane in 0..32 {
            let half = |bits: u32| convert(u64::from(bits), plan) as u32;
            result.0[lane] = half(high.0[lane]) << 16 | half(low.0[lane]);
        }
        warp.put(instruction.into[0], mask, &result);
    }
}
