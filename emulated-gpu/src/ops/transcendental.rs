//! Approximations of `ex2` and `lg2`. Their errors are within the bounds of PTX (2^-22).

/// Computes 2^x by a Taylor series in the difference of x and the nearest integer.
#[inline(always)]
pub(super) fn exp2(x: f32) -> f32 {
    // ln(2)^k / k!
    const TERMS: [f32; 8] = [
        1.0,
        std::f32::consts::LN_2,
        0.240_226_5,
        0.055_504_11,
        0.009_618_129,
        0.001_333_355_8,
        1.540_353e-4,
        1.525_273_4e-5,
    ];
    // 1.5 * 2^23. A sum of a small number and this constant is rounded to an integer, because an f32 of this magnitude
    // has no bits for fractions.
    const SHIFTER: f32 = 12_582_912.0;
    let limited = if x > -160.0 { x } else { -160.0 };
    let limited = if limited < 130.0 { limited } else { 130.0 };
    let whole = (limited + SHIFTER) - SHIFTER;
    let part = limited - whole;
    let mut value = TERMS[7];
    value = value.mul_add(part, TERMS[6]);
    value = value.mul_add(part, TERMS[5]);
    value = value.mul_add(part, TERMS[4]);
    value = value.mul_add(part, TERMS[3]);
    value = value.mul_add(part, TERMS[2]);
    value = value.mul_add(part, TERMS[1]);
    value = value.mul_add(part, TERMS[0]);
    // SAFETY: `whole` lies between -160 and 130. A checked conversion would be slow.
    let exponent: i32 = unsafe { whole.to_int_unchecked() };
    // The power of two is applied as two factors. Neither factor overflows, and a subnormal result is rounded only in
    // the last product.
    let half = exponent >> 1;
    let power = |e: i32| f32::from_bits(((e + 127) as u32) << 23);
    let value = value * power(half) * power(exponent - half);
    if x.is_nan() { x } else { value }
}

/// Computes the logarithm to base 2 by the series of `atanh`.
#[inline(always)]
pub(super) fn log2(x: f32) -> f32 {
    const TWO_OVER_LN_2: f32 = 2.885_39;
    let small = x < f32::MIN_POSITIVE;
    let scaled = if small { x * 16_777_216.0 } else { x };
    let bits = scaled.to_bits();
    // Scales the mantissa to between sqrt(1/2) and sqrt(2). 0x3f3504f3 is sqrt(1/2).
    let offset = bits.wrapping_sub(0x3f35_04f3);
    let exponent = (offset as i32 >> 23) - if small { 24 } else { 0 };
    let mantissa = f32::from_bits((offset & 0x007f_ffff) + 0x3f35_04f3);
    let t = (mantissa - 1.0) / (mantissa + 1.0);
    let square = t * t;
    let series = square.mul_add(1.0 / 9.0, 1.0 / 7.0);
    let series = square.mul_add(series, 1.0 / 5.0);
    let series = square.mul_add(series, 1.0 / 3.0);
    let series = (t * square).mul_add(series, t);
    let value = series.mul_add(TWO_OVER_LN_2, exponent as f32);
    if x > 0.0 {
        if x < f32::INFINITY { value } else { x }
    } else if x == 0.0 {
        f32::NEG_INFINITY
    } else {
        f32::NAN
    }
}
