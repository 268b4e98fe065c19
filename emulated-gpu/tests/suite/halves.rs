//! Tests arithmetic of bf16 and f16, alone and in pairs.

use super::snippet::check;

#[test]
fn sums_round_once() {
    // bf16: 256 + 1 lies half way between 256 and 258.
    check(
        "add.rn.bf16x2",
        32,
        &[32, 32],
        &[
            &[0x4380_3f80, 0x3f80_3f80, 0x4380_4000],
            &[0x4381_3f80, 0x3f80_bf80, 0x4382_0000],
            &[0x7f80_7fc0, 0xff80_3f80, 0x7fff_7fff],
        ],
    );
    // f16: 2048 + 1 lies half way between 2048 and 2050.
    check(
        "add.f16x2",
        32,
        &[32, 32],
        &[&[0x6800_3c00, 0x3c00_3c00, 0x6800_4000], &[0x7bff_0001, 0x7bff_0001, 0x7c00_0002]],
    );
    check("sub.f16x2", 32, &[32, 32], &[&[0x3c00_4000, 0x3c00_3c00, 0x0000_3c00]]);
    check("mul.bf16x2", 32, &[32, 32], &[&[0x4000_4040, 0x4000_4040, 0x4080_4110]]);
    check("mul.f16x2", 32, &[32, 32], &[&[0x0001_4000, 0x3800_4200, 0x0000_4600]]);
    // The fused operation keeps the bits that a rounded product would lose: (1 + 2^-7)^2 - (1 + 2^-6) = 2^-14.
    check("fma.rn.bf16x2", 32, &[32, 32, 32], &[&[0x3f81_4000, 0x3f81_4040, 0xbf82_3f80, 0x3880_40e0]]);
    check("fma.rn.f16x2", 32, &[32, 32, 32], &[&[0x3c01_3c00, 0x3c01_4000, 0xbc02_3c00, 0x0010_4200]]);
    check("fma.rn.relu.bf16x2", 32, &[32, 32, 32], &[&[0xbf80_4000, 0x3f80_4000, 0x0000_0000, 0x0000_4080]]);
    // 1.5 (1 + 2^-10) is a tie between two f16. The exact result of the second case is 2^-24 below this tie. A result
    // rounded to f32 first would be the tie.
    check(
        "fma.rn.f16",
        16,
        &[16, 16, 16],
        &[&[0x3c01, 0x3e00, 0x0000, 0x3e02], &[0x3c01, 0x3e00, 0x8001, 0x3e01]],
    );
}

#[test]
fn single_halves() {
    check("add.bf16", 16, &[16, 16], &[&[0x3f80, 0x3f80, 0x4000]]);
    check("mul.f16", 16, &[16, 16], &[&[0x4000, 0x4200, 0x4600]]);
    check("neg.bf16", 16, &[16], &[&[0x3f80, 0xbf80]]);
    check("abs.f16x2", 32, &[32], &[&[0xbc00_fc00, 0x3c00_7c00]]);
    check(
        "max.bf16x2",
        32,
        &[32, 32],
        &[&[0x3f80_c000, 0x4000_bf80, 0x4000_bf80], &[0x7fc0_8000, 0x3f80_0000, 0x3f80_0000]],
    );
    check(
        "min.f16x2",
        32,
        &[32, 32],
        &[&[0x3c00_7e00, 0x4000_7e00, 0x3c00_7fff], &[0x0000_8000, 0x8000_0000, 0x8000_8000]],
    );
    check("max.NaN.f16x2", 32, &[32, 32], &[&[0x7e00_3c00, 0x3c00_4000, 0x7fff_4000]]);
    check("setp.lt.bf16", 1, &[16, 16], &[&[0x3f80, 0x4000, 1], &[0x7fc0, 0x4000, 0]]);
    check("setp.geu.f16", 1, &[16, 16], &[&[0x3c00, 0x4000, 0], &[0x7e00, 0x4000, 1]]);
}

#[test]
fn flushing_of_f16() {
    check("add.f16", 16, &[16, 16], &[&[0x0001, 0x0001, 0x0002]]);
    check("add.ftz.f16", 16, &[16, 16], &[&[0x0001, 0x0001, 0x0000], &[0x8001, 0x8001, 0x8000]]);
    check("mul.sat.f16", 16, &[16, 16], &[&[0x4000, 0x4000, 0x3c00], &[0xc000, 0x4000, 0x0000]]);
}
