//! Rounding as PTX defines it.
//!
//! An operation in a directed mode is computed in f64 and rounded to *odd*: if the f64 is not exact, its last bit is 1.
//! In any mode, rounding such an f64 to f32 gives the same result as rounding the exact value. The reason is that f64
//! has more than two bits of mantissa in addition to those of f32 (Boldo and Melquiond, "When double rounding is odd",
//! 2005).

/// Rounding mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Rounding {
    #[default]
    Nearest,
    Zero,
    Down,
    Up,
}

impl Rounding {
    /// Returns the mode of a modifier such as `.rn` or `.rzi`, by its second letter.
    pub fn of_letter(letter: u8) -> Option<Self> {
        match letter {
            b'n' => Some(Rounding::Nearest),
            b'z' => Some(Rounding::Zero),
            b'm' => Some(Rounding::Down),
            b'p' => Some(Rounding::Up),
            _ => None,
        }
    }

    pub fn of_bits(bits: u32) -> Self {
        match bits & 3 {
            0 => Rounding::Nearest,
            1 => Rounding::Zero,
            2 => Rounding::Down,
            _ => Rounding::Up,
        }
    }

    pub fn bits(self) -> u32 {
        self as u32
    }
}

/// The NaN that f32 operations return.
pub(super) const NAN: f32 = f32::from_bits(0x7fff_ffff);

/// Replaces any NaN by the NaN that GPUs return. Compares bits, because the compiler may treat all NaNs of f32 as
/// equal.
#[inline(always)]
pub(super) fn canonical(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { 0x7fff_ffff } else { bits })
}

/// Replaces a subnormal by a zero with the same sign.
#[inline(always)]
pub(super) fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { f32::from_bits(x.to_bits() & 0x8000_0000) } else { x }
}

/// Limits `x` to 0..1, and replaces NaN by zero.
#[inline(always)]
pub(super) fn saturate(x: f32) -> f32 {
    if x > 0.0 { if x < 1.0 { x } else { 1.0 } } else { 0.0 }
}

/// Rounds to odd. If `value` is not exact and its last bit is 0, returns the next number in the direction of `error`.
/// Otherwise returns `value`. `error` has the sign of the exact result minus `value`.
fn odd(value: f64, error: f64) -> f64 {
    if error == 0.0 || !value.is_finite() || value.to_bits() & 1 == 1 {
        return value;
    }
    if error > 0.0 { value.next_up() } else { value.next_down() }
}

/// Returns the signed zero of a sum that is zero. It is negative if both terms are negative, or if they cancel and the
/// rounding is downwards.
fn zero_of(a: f64, b: f64, rounding: Rounding) -> f64 {
    match (a.is_sign_negative(), b.is_sign_negative()) {
        (true, true) => -0.0,
        (false, false) => 0.0,
        _ if rounding == Rounding::Down => -0.0,
        _ => 0.0,
    }
}

/// Returns `a + b`, rounded to odd. Computes the rounding error exactly (Knuth's TwoSum).
pub(super) fn sum(a: f64, b: f64, rounding: Rounding) -> f64 {
    let value = a + b;
    if value == 0.0 {
        return zero_of(a, b, rounding);
    }
    let from_b = value - a;
    odd(value, (a - (value - from_b)) + (b - from_b))
}

/// Returns `a * b`. The product is exact if both factors have at most 26 bits of mantissa.
pub(super) fn product(a: f64, b: f64) -> f64 {
    a * b
}

/// Returns `a / b`, rounded to odd.
pub(super) fn quotient(a: f64, b: f64) -> f64 {
    let value = a / b;
    if value.is_finite() && b.is_finite() {
        let rest = (-value).mul_add(b, a);
        odd(value, if b < 0.0 { -rest } else { rest })
    } else {
        value
    }
}

/// Returns `sqrt(a)`, rounded to odd.
pub(super) fn root(a: f64) -> f64 {
    let value = a.sqrt();
    if value.is_finite() { odd(value, (-value).mul_add(value, a)) } else { value }
}

/// Rounds an f64 that is exact or rounded to odd to f32.
pub(super) fn to_f32(x: f64, rounding: Rounding) -> f32 {
    let nearest = x as f32;
    if x.is_nan() {
        return NAN;
    }
    let (below, above) = (f64::from(nearest) < x, f64::from(nearest) > x);
    match rounding {
        Rounding::Nearest => nearest,
        Rounding::Down if above => nearest.next_down(),
        Rounding::Up if below => nearest.next_up(),
        Rounding::Zero if above && x > 0.0 => nearest.next_down(),
        Rounding::Zero if below && x < 0.0 => nearest.next_up(),
        _ => nearest,
    }
}

/// Rounds an f64 that is exact or rounded to odd to an f32 rounded to odd, for a second rounding to fewer bits.
pub(super) fn to_odd_f32(x: f64) -> f32 {
    let cut = to_f32(x, Rounding::Zero);
    if f64::from(cut) == x || x.is_nan() || x.is_infinite() { cut } else { f32::from_bits(cut.to_bits() | 1) }
}
