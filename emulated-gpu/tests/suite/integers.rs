//! Tests integer and bit operations: corner cases of division, shifts past the width, bit fields.

use super::snippet::{check, check_body};

const fn s(value: i32) -> u64 {
    value as u32 as u64
}

const fn l(value: i64) -> u64 {
    value as u64
}

#[test]
fn sums_and_products() {
    check("add.s32", 32, &[32, 32], &[&[s(i32::MAX), 1, s(i32::MIN)]]);
    check(
        "add.sat.s32",
        32,
        &[32, 32],
        &[&[s(i32::MAX), 1, s(i32::MAX)], &[s(i32::MIN), s(-1), s(i32::MIN)]],
    );
    check("sub.sat.s32", 32, &[32, 32], &[&[s(i32::MIN), 1, s(i32::MIN)], &[5, 7, s(-2)]]);
    check("add.u64", 64, &[64, 64], &[&[u64::MAX, 2, 1]]);
    check("mul.lo.s32", 32, &[32, 32], &[&[s(-3), 7, s(-21)], &[0x10000, 0x10000, 0]]);
    check("mul.hi.u32", 32, &[32, 32], &[&[s(-1), s(-1), 0xffff_fffe], &[0x10000, 0x10000, 1]]);
    check("mul.hi.s32", 32, &[32, 32], &[&[s(-1), s(-1), 0], &[s(i32::MIN), 2, s(-1)]]);
    check("mul.hi.u64", 64, &[64, 64], &[&[u64::MAX, u64::MAX, u64::MAX - 1]]);
    check("mul.wide.s32", 64, &[32, 32], &[&[s(-3), 5, l(-15)]]);
    check("mul.wide.u32", 64, &[32, 32], &[&[s(-1), 2, 0x1_ffff_fffe]]);
    check("mul.wide.u16", 32, &[16, 16], &[&[0xffff, 0xffff, 0xfffe_0001]]);
    check("mad.lo.s32", 32, &[32, 32, 32], &[&[s(-3), 7, 1, s(-20)]]);
    check("mad.wide.u32", 64, &[32, 32, 64], &[&[s(-1), 1, 1, 1 << 32]]);
    check("mad.hi.u32", 32, &[32, 32, 32], &[&[s(-1), s(-1), 3, 1]]);
    check("sad.s32", 32, &[32, 32, 32], &[&[s(-5), 5, 1, 11]]);
    check("min.s32", 32, &[32, 32], &[&[s(-1), 1, s(-1)]]);
    check("min.u32", 32, &[32, 32], &[&[s(-1), 1, 1]]);
    check("max.s64", 64, &[64, 64], &[&[l(-1), 1, 1]]);
    check("abs.s32", 32, &[32], &[&[s(i32::MIN), s(i32::MIN)], &[s(-4), 4]]);
    check("neg.s64", 64, &[64], &[&[5, l(-5)]]);
}

#[test]
fn quotients_and_rests() {
    check(
        "div.s32",
        32,
        &[32, 32],
        &[&[s(-7), 2, s(-3)], &[7, s(-2), s(-3)], &[s(i32::MIN), s(-1), s(i32::MIN)]],
    );
    check("rem.s32", 32, &[32, 32], &[&[s(-7), 2, s(-1)], &[7, s(-2), 1], &[s(i32::MIN), s(-1), 0]]);
    check("div.u32", 32, &[32, 32], &[&[s(-7), 2, 0x7fff_fffc], &[9, 0, 0xffff_ffff]]);
    check("rem.u32", 32, &[32, 32], &[&[s(-7), 10, 9], &[9, 0, 9]]);
    check("div.u64", 64, &[64, 64], &[&[u64::MAX, 3, 0x5555_5555_5555_5555], &[1, 0, u64::MAX]]);
    check("rem.s64", 64, &[64, 64], &[&[l(-10), 4, l(-2)]]);
    check("div.u16", 16, &[16, 16], &[&[0xffff, 2, 0x7fff]]);
}

#[test]
fn shifts_past_the_width_leave_zeros_or_the_sign() {
    check(
        "shl.b32",
        32,
        &[32, 32],
        &[&[1, 31, 1 << 31], &[1, 32, 0], &[1, 33, 0], &[1, s(-1), 0], &[5, 0, 5]],
    );
    check("shr.u32", 32, &[32, 32], &[&[s(-1), 31, 1], &[s(-1), 32, 0], &[s(-1), s(-1), 0]]);
    check(
        "shr.s32",
        32,
        &[32, 32],
        &[&[s(-8), 1, s(-4)], &[s(-8), 32, s(-1)], &[8, 40, 0], &[s(-8), s(-1), s(-1)]],
    );
    check("shr.b32", 32, &[32, 32], &[&[s(-1), 4, 0x0fff_ffff]]);
    check("shl.b64", 64, &[64, 32], &[&[1, 63, 1 << 63], &[1, 64, 0], &[3, 1, 6]]);
    check("shr.s64", 64, &[64, 32], &[&[l(-1), 64, l(-1)], &[l(-16), 2, l(-4)]]);
    check("shr.u64", 64, &[64, 32], &[&[l(-1), 64, 0], &[l(-1), 60, 15]]);
    check("shl.b16", 16, &[16, 32], &[&[1, 15, 0x8000], &[1, 16, 0]]);
    check("shf.l.wrap.b32", 32, &[32, 32, 32], &[&[0x8000_0000, 1, 1, 3], &[7, 9, 32, 9], &[7, 9, 0, 9]]);
    check("shf.l.clamp.b32", 32, &[32, 32, 32], &[&[0x8000_0000, 1, 1, 3], &[7, 9, 32, 7], &[7, 9, 99, 7]]);
    check("shf.r.wrap.b32", 32, &[32, 32, 32], &[&[2, 1, 1, 0x8000_0001], &[7, 9, 32, 7]]);
    check("shf.r.clamp.b32", 32, &[32, 32, 32], &[&[2, 1, 1, 0x8000_0001], &[7, 9, 32, 9], &[7, 9, 40, 9]]);
}

#[test]
fn fields_of_bits() {
    check(
        "bfe.u32",
        32,
        &[32, 32, 32],
        &[
            &[0xabcd_1234, 8, 8, 0x12],
            &[0xabcd_1234, 28, 8, 0xa],
            &[0xabcd_1234, 32, 8, 0],
            &[0xabcd_1234, 0, 32, 0xabcd_1234],
            &[0xabcd_1234, 4, 0, 0],
            // Only the low eight bits of position and length have an effect.
            &[0xabcd_1234, 0x108, 0x108, 0x12],
        ],
    );
    check(
        "bfe.s32",
        32,
        &[32, 32, 32],
        &[
            &[0x0000_0f00, 8, 4, s(-1)],
            &[0x0000_0700, 8, 4, 7],
            &[0x8000_0000, 28, 8, s(-8)],
            &[0x8000_0000, 40, 3, s(-1)],
            &[0x8000_0000, 40, 0, 0],
        ],
    );
    check("bfe.u64", 64, &[64, 32, 32], &[&[0xff00_0000_0000_0000, 60, 4, 15]]);
    check(
        "bfi.b32",
        32,
        &[32, 32, 32, 32],
        &[
            &[0xff, 0, 4, 4, 0xf0],
            &[0, 0xffff_ffff, 8, 8, 0xffff_00ff],
            &[0xf, 0, 30, 8, 0xc000_0000],
            &[5, 6, 32, 4, 6],
            &[5, 6, 0, 0, 6],
            &[5, 6, 0, 99, 5],
        ],
    );
    check("bfi.b64", 64, &[64, 64, 32, 32], &[&[3, 0, 62, 2, 3 << 62]]);
    check("bfind.u32", 32, &[32], &[&[0x0001_0000, 16], &[0, s(-1)], &[s(-1), 31]]);
    check("bfind.s32", 32, &[32], &[&[s(-1), s(-1)], &[s(-2), 0], &[0x100, 8]]);
    check("bfind.shiftamt.u32", 32, &[32], &[&[0x0001_0000, 15], &[0, s(-1)]]);
    check("bfind.u64", 32, &[64], &[&[1 << 40, 40]]);
    check(
        "bmsk.clamp.b32",
        32,
        &[32, 32],
        &[&[4, 8, 0xff0], &[0, 32, s(-1)], &[32, 4, 0], &[8, 40, 0xffff_ff00]],
    );
    check("bmsk.wrap.b32", 32, &[32, 32], &[&[36, 4, 0xf0], &[0, 32, 0]]);
    check("popc.b32", 32, &[32], &[&[0xf00f, 8]]);
    check("popc.b64", 32, &[64], &[&[u64::MAX, 64]]);
    check("clz.b32", 32, &[32], &[&[0, 32], &[1, 31]]);
    check("clz.b64", 32, &[64], &[&[0, 64], &[1, 63]]);
    check("brev.b32", 32, &[32], &[&[1, 1 << 31]]);
    check("brev.b64", 64, &[64], &[&[1, 1 << 63]]);
    check("cnot.b32", 32, &[32], &[&[0, 1], &[7, 0]]);
    check("not.b16", 16, &[16], &[&[0x0f0f, 0xf0f0]]);
    check(
        "prmt.b32",
        32,
        &[32, 32, 32],
        &[
            &[0x3322_1100, 0x7766_5544, 0x7654, 0x7766_5544],
            &[0x3322_1100, 0x7766_5544, 0x0426, 0x0044_2266],
            // If bit 3 of a selector is set, each bit of the byte is replaced by the byte's sign.
            &[0x0000_80ff, 0, 0x9810, 0xffff_80ff],
        ],
    );
}

#[test]
fn lop3_is_any_function_of_three() {
    // The table of a three-input function is the function's bitwise value for the inputs 0xf0, 0xcc and 0xaa.
    let (a, b, c) = (0x0f0f_3355_u64, 0x3333_5aa5_u64, 0x5555_c3c3_u64);
    for table in [0x80_u32, 0xfe, 0x96, 0xe8, 0xca, 0x00, 0xff, 0x1b] {
        let mut expected = 0;
        for bit in 0..32 {
            let index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1;
            expected |= u64::from(table >> index & 1) << bit;
        }
        let body = format!("lop3.b32 %o, %a, %b, %c, {table:#x};\n");
        check_body(&body, 32, &[32, 32, 32], &[&[a, b, c, expected]]);
    }
}

#[test]
fn comparisons_and_choices() {
    check("setp.lt.s32", 1, &[32, 32], &[&[s(-1), 1, 1]]);
    check("setp.lt.u32", 1, &[32, 32], &[&[s(-1), 1, 0]]);
    check("setp.hi.u32", 1, &[32, 32], &[&[s(-1), 1, 1]]);
    check("setp.ge.u64", 1, &[64, 64], &[&[l(-1), 1, 1], &[1, 1, 1]]);
    check("setp.eq.b16", 1, &[16, 16], &[&[7, 7, 1]]);
    check("selp.b32", 32, &[32, 32, 1], &[&[1, 2, 1, 1], &[1, 2, 0, 2]]);
    check("selp.f32", 32, &[32, 32, 1], &[&[1, 2, 1, 1], &[1, 2, 0, 2]]);
    check("selp.b64", 64, &[64, 64, 1], &[&[1, 2, 0, 2]]);
    check("and.pred", 1, &[1, 1], &[&[1, 1, 1], &[1, 0, 0]]);
    check("xor.pred", 1, &[1, 1], &[&[1, 1, 0], &[1, 0, 1]]);
    check("not.pred", 1, &[1], &[&[1, 0], &[0, 1]]);
    let third = |name: &str| format!("setp.lt.{name}.u32 %o, %a, %b, %c;\n");
    check_body(&third("and"), 1, &[32, 32, 1], &[&[1, 2, 1, 1], &[1, 2, 0, 0], &[2, 1, 1, 0]]);
    check_body(&third("or"), 1, &[32, 32, 1], &[&[2, 1, 1, 1], &[2, 1, 0, 0]]);
    check_body(&third("xor"), 1, &[32, 32, 1], &[&[1, 2, 1, 0], &[2, 1, 1, 1]]);
    check_body("setp.lt.and.u32 %o, %a, %b, !%c;\n", 1, &[32, 32, 1], &[&[1, 2, 0, 1], &[1, 2, 1, 0]]);
    // The second target gets the complement of the comparison's result, combined with the third predicate.
    check_body(
        "setp.lt.and.u32 %p1|%o, %a, %b, %c;\n",
        1,
        &[32, 32, 1],
        &[&[1, 2, 1, 0], &[2, 1, 1, 1], &[2, 1, 0, 0]],
    );
}

#[test]
fn moves_pack_and_unpack() {
    check_body("mov.b64 %o, {%a, %b};\n", 64, &[32, 32], &[&[1, 2, 2 << 32 | 1]]);
    check_body("mov.b32 %o, {%a, %b};\n", 32, &[16, 16], &[&[1, 2, 2 << 16 | 1]]);
    check_body("mov.b64 %o, {%a, %b, %c, %d};\n", 64, &[16; 4], &[&[1, 2, 3, 4, 0x0004_0003_0002_0001]]);
    check_body("mov.b64 {%t1, %o}, %a;\n", 32, &[64], &[&[7 << 32 | 5, 7]]);
    check_body("mov.b64 {%o, _}, %a;\n", 32, &[64], &[&[7 << 32 | 5, 5]]);
    let halves = "{ .reg .b16 %h<2>; mov.b32 {%h0, %h1}, %a; mov.b32 %o, {%h1, %h0}; }\n";
    check_body(halves, 32, &[32], &[&[0x1234_5678, 0x5678_1234]]);
}
