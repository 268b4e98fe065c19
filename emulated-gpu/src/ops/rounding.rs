//! Rounding as PTX defines it.
//!
//! An operation in a directed mode is computed in f64 and made *odd*: where the f64 is not exact, its last bit is set.
//! A rounding of an odd f64 to f32 in any mode is that of the exact value, since f64 has more than two bits beyond
//! f32's (Boldo and Melquiond, "When double rounding is odd", 2005).

/// Direction of a rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Rounding {
    #[default]
    Nearest,
    Zero,
    Down,
    Up,
}

impl Rounding {
    /// The mode of `.rn`, `.rzi` and their like, by their second letter.
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

/// NaN as each f32 operation gives it.
pub(super) const NAN: f32 = f32::from_bits(0x7fff_ffff);

/// `x`, with each NaN the one that GPUs make. It compares bits: the compiler may treat all NaN of f32 as equal.
#[inline(always)]
pub(super) fn canonical(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { 0x7fff_ffff } else { bits })
}

/// `x`, with zero of its sign for a subnormal.
#[inline(always)]
pub(super) fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { f32::from_bits(x.to_bits() & 0x8000_0000) } else { x }
}

/// `x` limited to 0..1, with zero for NaN.
#[inline(always)]
pub(super) fn saturate(x: f32) -> f32 {
    if x > 0.0 { if x < 1.0 { x } else { 1.0 } } else { 0.0 }
}

/// The f64 with its last bit set if `value` is not exact; `error` is the exact result less `value`, or has its sign.
fn odd(value: f64, error: f64) -> f64 {
    if error == 0.0 || !value.is_finite() || value.to_bits() & 1 == 1 {
        return value;
    }
    if error > 0.0 { value.next_up() } else { value.next_down() }
}

/// Zero that a sum gives: negative if both terms are, or if they cancel and the rounding is downwards.
fn zero_of(a: f64, b: f64, rounding: Rounding) -> f64 {
    match (a.is_sign_negative(), b.is_sign_negative()) {
        (true, true) => -0.0,
        (false, false) => 0.0,
        _ if rounding == Rounding::Down => -0.0,
        _ => 0.0,
    }
}

/// `a + b`, odd. The error of a sum is exact (Knuth's TwoSum).
pub(super) fn sum(a: f64, b: f64, rounding: Rounding) -> f64 {
    let value = a + b;
    if value == 0.0 {
        return zero_of(a, b, rounding);
    }
    let from_b = value - a;
    odd(value, (a - (value - from_b)) + (b - from_b))
}

/// `a * b` of two values of at most 26 bits: exact.
pub(super) fn product(a: f64, b: f64) -> f64 {
    a * b
}

/// `a / b`, odd.
pub(super) fn quotient(a: f64, b: f64) -> f64 {
    let value = a / b;
    if value.is_finite() && b.is_finite() {
        let rest = (-value).mul_add(b, a);
        odd(value, if b < 0.0 { -rest } else { rest })
    } else {
        value
    }
}

/// `sqrt(a)`, odd.
pub(super) fn root(a: f64) -> f64 {
    let value = a.sqrt();
    if value.is_finite() { odd(value, (-value).mul_add(value, a)) } else { value }
}

/// An odd or exact f64 as f32.
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

/// An odd or exact f64 as an odd f32, for a second rounding to fewer bits.
pub(super) fn to_odd_f32(x: f64) -> f32 {
    let cut = to_f32(x, Rounding::Zero);
    if f64::from(cut) == x || x.is_nan() || x.is_infinite() { cut } else { f32::from_bits(cut.to_bits() | 1) }
}
