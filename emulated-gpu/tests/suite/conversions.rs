//! Tests `cvt` in all directions.

use super::snippet::{check, check_body, f};

const NAN: u64 = 0x7fc0_0000;
const INF: f32 = f32::INFINITY;

const fn s(value: i32) -> u64 {
    value as u32 as u64
}

const fn l(value: i64) -> u64 {
    value as u64
}

#[test]
fn between_integers() {
    check("cvt.u64.u32", 64, &[32], &[&[s(-1), 0xffff_ffff]]);
    check("cvt.s64.s32", 64, &[32], &[&[s(-1), l(-1)]]);
    check("cvt.u32.u64", 32, &[64], &[&[0x1_2345_6789, 0x2345_6789]]);
    check("cvt.s32.s16", 32, &[16], &[&[0x8000, 0xffff_8000]]);
    check("cvt.u32.u16", 32, &[16], &[&[0x8000, 0x8000]]);
    check("cvt.u16.u32", 16, &[32], &[&[0x0012_3456, 0x3456]]);
    // Wider registers hold 8-bit values. A conversion ignores the upper bits of the source and extends the result.
    check("cvt.s32.s8", 32, &[32], &[&[0x1ff, s(-1)], &[0x17f, 127]]);
    check("cvt.u32.u8", 32, &[32], &[&[0x1ff, 255]]);
    check("cvt.s16.s8", 16, &[16], &[&[0x80, 0xff80]]);
    check("cvt.u8.u32", 16, &[32], &[&[0x1ff, 0xff]]);
    check("cvt.s8.s32", 32, &[32], &[&[0x80, 0xffff_ff80]]);
    check("cvt.sat.u8.s32", 32, &[32], &[&[s(-5), 0], &[300, 255], &[7, 7]]);
    check("cvt.sat.s8.s32", 32, &[32], &[&[s(-500), s(-128)], &[300, 127]]);
    check("cvt.sat.s32.s64", 32, &[64], &[&[1 << 40, s(i32::MAX)], &[l(-(1 << 40)), s(i32::MIN)]]);
    check("cvt.sat.u32.s32", 32, &[32], &[&[s(-1), 0]]);
}

#[test]
fn floats_to_integers_round_and_clamp() {
    check(
        "cvt.rni.s32.f32",
        32,
        &[32],
        &[&[f(2.5), 2], &[f(3.5), 4], &[f(-2.5), s(-2)], &[f(1e10), s(i32::MAX)]],
    );
    check(
        "cvt.rzi.s32.f32",
        32,
        &[32],
        &[&[f(2.9), 2], &[f(-2.9), s(-2)], &[f(-1e10), s(i32::MIN)], &[NAN, 0], &[f(-INF), s(i32::MIN)]],
    );
    check("cvt.rmi.s32.f32", 32, &[32], &[&[f(-2.1), s(-3)], &[f(2.9), 2]]);
    check("cvt.rpi.s32.f32", 32, &[32], &[&[f(2.1), 3], &[f(-2.9), s(-2)]]);
    check("cvt.rzi.u32.f32", 32, &[32], &[&[f(-1.0), 0], &[f(5e9), 0xffff_ffff], &[f(3e9), 3_000_000_000]]);
    check("cvt.rzi.u64.f32", 64, &[32], &[&[f(1e12), 999_999_995_904], &[f(-1.0), 0], &[NAN, 1 << 63]]);
    check("cvt.rzi.s64.f32", 64, &[32], &[&[NAN, 1 << 63], &[f(-3.7), l(-3)]]);
    check("cvt.rzi.s32.f64", 32, &[64], &[&[f64::to_bits(f64::NAN), 1 << 31], &[f64::to_bits(-7.5), s(-7)]]);
    check("cvt.rni.s8.f32", 32, &[32], &[&[f(200.0), 127], &[f(-200.0), s(-128)]]);
    check("cvt.rni.u8.f32", 16, &[32], &[&[f(254.5), 254], &[f(-1.0), 0]]);
    check("cvt.rmi.ftz.s32.f32", 32, &[32], &[&[0x8000_0001, 0]]);
    check("cvt.rmi.s32.f32", 32, &[32], &[&[0x8000_0001, s(-1)]]);
    check("cvt.rzi.s16.f32", 16, &[32], &[&[f(1e6), 0x7fff]]);
}

#[test]
fn integers_to_floats_round() {
    // 2^24 + 1 lies half way between two f32.
    let middle = (1 << 24) + 1;
    check("cvt.rn.f32.s32", 32, &[32], &[&[middle, f(16_777_216.0)], &[s(-3), f(-3.0)]]);
    check("cvt.rp.f32.s32", 32, &[32], &[&[middle, f(16_777_218.0)]]);
    check("cvt.rm.f32.s32", 32, &[32], &[&[s(-(middle as i32)), f(-16_777_218.0)]]);
    check("cvt.rz.f32.s32", 32, &[32], &[&[s(-(middle as i32)), f(-16_777_216.0)]]);
    check("cvt.rn.f32.u32", 32, &[32], &[&[s(-1), f(4_294_967_296.0)]]);
    check("cvt.rz.f32.u32", 32, &[32], &[&[s(-1), f(4_294_967_040.0)]]);
    // 2^63, plus half a unit in the last place of f32, plus 1. f64 would drop the 1, and the result would be a tie that
    // rounds down.
    let double = (1 << 63) + (1 << 39) + 1;
    check(
        "cvt.rn.f32.u64",
        32,
        &[64],
        &[&[double, f(9.223_373e18)], &[u64::MAX, f(18_446_744_073_709_551_616.0)]],
    );
    check("cvt.rn.f32.s64", 32, &[64], &[&[l(-1), f(-1.0)]]);
    check(
        "cvt.rn.f64.s64",
        64,
        &[64],
        &[&[l(-9), (-9f64).to_bits()], &[(1 << 53) + 1, 9_007_199_254_740_992f64.to_bits()]],
    );
    check("cvt.rn.f64.u32", 64, &[32], &[&[s(-1), 4_294_967_295f64.to_bits()]]);
    check("cvt.rn.f32.u16", 32, &[16], &[&[0xffff, f(65_535.0)]]);
    check("cvt.rn.f32.s8", 32, &[32], &[&[0x80, f(-128.0)]]);
    check("cvt.rn.f16.s32", 16, &[32], &[&[2049, 0x6800], &[2051, 0x6802], &[100_000, 0x7c00]]);
}

#[test]
fn floats_to_floats() {
    check("cvt.f64.f32", 64, &[32], &[&[f(0.1), f64::from(0.1f32).to_bits()]]);
    let half = 1.0 + f64::from(f32::EPSILON) / 2.0;
    check("cvt.rn.f32.f64", 32, &[64], &[&[half.to_bits(), f(1.0)], &[1e300f64.to_bits(), f(INF)]]);
    check(
        "cvt.rp.f32.f64",
        32,
        &[64],
        &[&[half.to_bits(), f(1.0 + f32::EPSILON)], &[1e-300f64.to_bits(), 1]],
    );
    check("cvt.rm.f32.f64", 32, &[64], &[&[(-half).to_bits(), f(-1.0 - f32::EPSILON)]]);
    check("cvt.rz.f32.f64", 32, &[64], &[&[half.to_bits(), f(1.0)], &[1e300f64.to_bits(), f(f32::MAX)]]);
    check("cvt.rni.f32.f32", 32, &[32], &[&[f(2.5), f(2.0)], &[f(-0.3), f(-0.0)]]);
    check("cvt.rzi.f32.f32", 32, &[32], &[&[f(-2.7), f(-2.0)]]);
    check("cvt.rmi.f32.f32", 32, &[32], &[&[f(-2.1), f(-3.0)]]);
    check("cvt.rpi.f32.f32", 32, &[32], &[&[f(2.1), f(3.0)]]);
    check("cvt.sat.f32.f32", 32, &[32], &[&[f(2.1), f(1.0)], &[f(-2.1), 0], &[NAN, 0], &[f(0.5), f(0.5)]]);
    check("cvt.ftz.f32.f32", 32, &[32], &[&[1, 0], &[0x8000_0001, 0x8000_0000]]);
}

#[test]
fn halves_of_floats() {
    // 1 + 2^-8 lies half way between two bf16 and rounds to the even one.
    check(
        "cvt.rn.bf16.f32",
        16,
        &[32],
        &[
            &[f(1.0 + 1.0 / 256.0), 0x3f80],
            &[f(1.0 + 3.0 / 256.0), 0x3f82],
            &[f(1.0 + 1.0 / 256.0 + f32::EPSILON), 0x3f81],
            &[f(f32::MAX), 0x7f80],
            &[f(-INF), 0xff80],
            &[NAN, 0x7fff],
            &[0x0000_8001, 1],
            &[0x0000_8000, 0],
        ],
    );
    check("cvt.rz.bf16.f32", 16, &[32], &[&[f(1.999), 0x3fff], &[f(f32::MAX), 0x7f7f], &[f(-1.999), 0xbfff]]);
    check(
        "cvt.rn.f16.f32",
        16,
        &[32],
        &[
            &[f(1.0), 0x3c00],
            &[f(65_519.9), 0x7bff],
            &[f(65_520.0), 0x7c00],
            // 2^-24 is the smallest subnormal f16. Half of it is a tie, which rounds to zero.
            &[f(5.960_464_5e-8), 1],
            &[f(2.980_232_2e-8), 0],
            &[f(2.980_232_6e-8), 1],
            &[f(6.1e-5), 0x03ff],
            &[f(6.103_514_4e-5), 0x0400],
            &[NAN, 0x7fff],
        ],
    );
    check(
        "cvt.rz.f16.f32",
        16,
        &[32],
        &[&[f(1e6), 0x7bff], &[f(INF), 0x7c00], &[f(5.9e-8), 0], &[f(-1.9999), 0xbfff]],
    );
    check(
        "cvt.f32.f16",
        32,
        &[16],
        &[
            &[0x3c00, f(1.0)],
            &[1, f(5.960_464_5e-8)],
            &[0xfc00, f(-INF)],
            &[0x7e00, 0x7fff_ffff],
            &[0x0400, f(6.103_515_6e-5)],
        ],
    );
    check("cvt.f32.bf16", 32, &[16], &[&[0x3f81, 0x3f81_0000], &[1, 0x0001_0000]]);
    check("cvt.rn.relu.bf16.f32", 16, &[32], &[&[f(-1.0), 0], &[f(2.0), 0x4000], &[NAN, 0x7fff]]);
    check("cvt.rn.f16.f64", 16, &[64], &[&[(1.0 + 1.0 / 2048.0 + 1e-12f64).to_bits(), 0x3c01]]);
    // The first source becomes the upper half.
    check("cvt.rn.bf16x2.f32", 32, &[32, 32], &[&[f(1.0), f(2.0), 0x3f80_4000]]);
    check("cvt.rn.f16x2.f32", 32, &[32, 32], &[&[f(1.0), f(2.0), 0x3c00_4000]]);
    check("cvt.rz.bf16x2.f32", 32, &[32, 32], &[&[f(1.999), f(-1.999), 0x3fff_bfff]]);
    check("cvt.rn.relu.f16x2.f32", 32, &[32, 32], &[&[f(-1.0), f(2.0), 0x0000_4000]]);
}

#[test]
fn every_half_survives_the_way_through_f32() {
    let round =
        |into: &str| format!("{{ .reg .f32 %w; cvt.f32.{into} %w, %a; cvt.rn.{into}.f32 %o, %w; }}\n");
    for (into, exponent) in [("f16", 0x7c00), ("bf16", 0x7f80)] {
        let all: Vec<[u64; 2]> = (0..=0xffff_u64)
            .map(|bits| [bits, if bits & 0x7fff > exponent { 0x7fff } else { bits }])
            .collect();
        for chunk in all.chunks(1024) {
            let cases: Vec<&[u64]> = chunk.iter().map(|c| &c[..]).collect();
            check_body(&round(into), 16, &[16], &cases);
        }
    }
}

#[test]
fn tensor_floats_keep_ten_bits() {
    let ulp = 1.0 / 1024.0;
    check(
        "cvt.rna.tf32.f32",
        32,
        &[32],
        &[
            &[f(1.0 + ulp / 2.0), f(1.0 + ulp)],
            &[f(1.0 + ulp / 4.0), f(1.0)],
            &[f(-1.0 - ulp / 2.0), f(-1.0 - ulp)],
        ],
    );
    check(
        "cvt.rn.tf32.f32",
        32,
        &[32],
        &[&[f(1.0 + ulp / 2.0), f(1.0)], &[f(1.0 + ulp * 1.5), f(1.0 + 2.0 * ulp)]],
    );
}

/// The value of an e4m3 by its definition.
fn e4m3(code: u64) -> f32 {
    let (exponent, mantissa) = ((code >> 3 & 15) as i32, (code & 7) as f32);
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

#[test]
fn every_e4m3_survives_the_way_through_halves_and_floats() {
    let is_nan = |code: u64| code & 0x7f == 0x7f;
    let same = |code: u64| if is_nan(code) { 0x7f } else { code };
    let widened = "{ .reg .b32 %w; .reg .b16 %l, %h; .reg .f32 %f; cvt.rn.f16x2.e4m3x2 %w, %a; \
                   mov.b32 {%l, %h}, %w; cvt.f32.f16 %f, %HALF; mov.b32 %o, %f; }\n";
    let through = "{ .reg .b32 %w; cvt.rn.f16x2.e4m3x2 %w, %a; cvt.rn.satfinite.e4m3x2.f16x2 %o, %w; }\n";
    for first in (0..256).step_by(128) {
        // Each code stands beside another one, in both halves.
        let pairs: Vec<(u64, u64)> = (first..first + 128).map(|low| (low, (low * 7 + 3) % 256)).collect();
        let value = |code: u64| if is_nan(code) { 0x7fff_ffff } else { f(e4m3(code)) };
        for is_low in [true, false] {
            let cases: Vec<[u64; 2]> = pairs
                .iter()
                .map(|&(low, high)| [high << 8 | low, value(if is_low { low } else { high })])
                .collect();
            let cases: Vec<&[u64]> = cases.iter().map(|case| &case[..]).collect();
            let half = if is_low { "%l" } else { "%h" };
            check_body(&widened.replace("%HALF", half), 32, &[16], &cases);
        }
        let cases: Vec<[u64; 2]> =
            pairs.iter().map(|&(low, high)| [high << 8 | low, same(high) << 8 | same(low)]).collect();
        let cases: Vec<&[u64]> = cases.iter().map(|case| &case[..]).collect();
        check_body(through, 16, &[16], &cases);
        let value = |code: u64| if is_nan(code) { NAN } else { f(e4m3(code)) };
        let cases: Vec<[u64; 3]> =
            pairs.iter().map(|&(low, high)| [value(high), value(low), same(high) << 8 | same(low)]).collect();
        let cases: Vec<&[u64]> = cases.iter().map(|case| &case[..]).collect();
        check("cvt.rn.satfinite.e4m3x2.f32", 16, &[32, 32], &cases);
    }
}

#[test]
fn floats_round_to_e4m3() {
    let low = |x: f32, code: u64| [f(0.0), f(x), code];
    let mut cases = vec![
        // 1 + 1/16 lies half way between 1 and 1 + 1/8.
        low(1.0 + 1.0 / 16.0, 0x38),
        low(1.0 + 3.0 / 16.0, 0x3a),
        low(1.0 + 1.0 / 16.0 + f32::EPSILON, 0x39),
        // Rounding up to the next exponent, and to the smallest normal number.
        low(1.97, 0x40),
        low(2f32.powi(-6) - 2f32.powi(-12), 0x08),
        // Half of the smallest number is a tie, which rounds to zero.
        low(2f32.powi(-10), 0),
        low(2f32.powi(-10) * 1.001, 1),
        low(3.0 * 2f32.powi(-10), 2),
        low(1e-40, 0),
        low(-0.0, 0x80),
        low(448.0, 0x7e),
        low(464.0, 0x7e),
        low(f32::MAX, 0x7e),
        low(INF, 0x7e),
        low(-INF, 0xfe),
        [f(0.0), NAN, 0x7f],
    ];
    // Between two neighbours, all numbers below the middle round down, and all above round up.
    for code in 0..0x7e {
        let middle = (e4m3(code) + e4m3(code + 1)) / 2.0;
        cases.push(low(middle.next_down(), code));
        cases.push(low(-middle.next_up(), 0x80 | (code + 1)));
        cases.push(low(middle, code + (code & 1)));
    }
    for chunk in cases.chunks(512) {
        let chunk: Vec<&[u64]> = chunk.iter().map(|case| &case[..]).collect();
        check("cvt.rn.satfinite.e4m3x2.f32", 16, &[32, 32], &chunk);
    }
    // The first source becomes the upper number.
    check("cvt.rn.satfinite.e4m3x2.f32", 16, &[32, 32], &[&[f(1.0), f(-2.0), 0x38c0]]);
    // Halves beyond the largest e4m3.
    check("cvt.rn.satfinite.e4m3x2.f16x2", 16, &[32], &[&[0x7c00_fbff, 0x7efe], &[0x7e00_3c00, 0x7f38]]);
}
