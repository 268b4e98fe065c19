//! Floats of type e4m3: a sign, four bits of exponent with bias 7, and three of mantissa. There are no infinities.

/// Returns the value of a float.
pub(crate) fn value(bits: u8) -> f32 {
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    match (exponent, bits & 7) {
        (15, 7) => f32::NAN,
        (0, _) => sign * mantissa * 2f32.powi(-9),
        _ => sign * (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    }
}

/// Returns the float nearest to a finite number, ties to even. Numbers beyond the largest float become the largest.
pub(crate) fn nearest(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = value.abs().min(448.0);
    if magnitude < 2f32.powi(-6) {
        // The floats below are multiples of 2^-9.
        return sign | (magnitude * 512.0).round_ties_even() as u8;
    }
    let bits = magnitude.to_bits();
    let rounded = bits + 0x7_ffff + (bits >> 20 & 1);
    sign | ((rounded >> 20) - (120 << 3)) as u8
}

#[cfg(test)]
mod tests {
    use super::{nearest, value};

    #[test]
    fn each_float_is_nearest_to_itself_and_ties_go_to_even() {
        for bits in (0..=255u8).filter(|bits| bits & 0x7f != 0x7f) {
            assert_eq!(nearest(value(bits)), bits);
        }
        for bits in 0..0x7eu8 {
            let between = (value(bits) + value(bits + 1)) / 2.0;
            assert_eq!(nearest(between), bits + (bits & 1), "{between}");
            assert_eq!(nearest(between.next_up()), bits + 1);
            assert_eq!(nearest(between.next_down()), bits);
        }
        assert_eq!([nearest(1e9), nearest(-1e9)], [0x7e, 0xfe]);
    }
}
