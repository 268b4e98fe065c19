//! Tests arithmetic of f32 and f64: rounding modes, saturation, NaN, subnormals.

use super::snippet::{check, f, results};

const NAN: u64 = 0x7fff_ffff;
const INF: f32 = f32::INFINITY;
/// The smallest and the largest subnormal.
const TINY: f32 = f32::from_bits(1);
const SUBNORMAL: f32 = f32::from_bits(0x007f_ffff);
const ULP: f32 = f32::EPSILON;

#[test]
fn sums_round_as_named() {
    // 1 + 2^-24 lies half way between 1 and the next f32. 1 + 2^-25 is less than half way.
    let half = ULP / 2.0;
    let quarter = ULP / 4.0;
    let next = 1.0 + ULP;
    check(
        "add.rn.f32",
        32,
        &[32, 32],
        &[
            &[f(1.0), f(half), f(1.0)],
            &[f(next), f(half), f(1.0 + 2.0 * ULP)],
            &[f(1.0), f(half + quarter), f(next)],
            &[f(-0.0), f(-0.0), f(-0.0)],
            &[f(1.0), f(-1.0), f(0.0)],
            &[f(INF), f(-INF), NAN],
            &[0x7fc1_2345, f(1.0), NAN],
            &[f(f32::MAX), f(f32::MAX), f(INF)],
            &[f(TINY), f(TINY), 2],
        ],
    );
    check(
        "add.rz.f32",
        32,
        &[32, 32],
        &[
            &[f(1.0), f(half + quarter), f(1.0)],
            &[f(-1.0), f(-half - quarter), f(-1.0)],
            &[f(1.0), f(1e-38), f(1.0)],
            &[f(1.0), f(-1e-38), f(1.0 - ULP / 2.0)],
            &[f(f32::MAX), f(f32::MAX), f(f32::MAX)],
            &[f(1.0), f(-1.0), f(0.0)],
        ],
    );
    check(
        "add.rm.f32",
        32,
        &[32, 32],
        &[
            &[f(1.0), f(half + quarter), f(1.0)],
            &[f(-1.0), f(-1e-38), f(-next)],
            &[f(1.0), f(-1.0), f(-0.0)],
            &[f(0.0), f(-0.0), f(-0.0)],
            &[f(0.0), f(0.0), f(0.0)],
            &[f(f32::MAX), f(f32::MAX), f(f32::MAX)],
            &[f(-f32::MAX), f(-f32::MAX), f(-INF)],
        ],
    );
    check(
        "sub.rp.f32",
        32,
        &[32, 32],
        &[
            &[f(1.0), f(-1e-38), f(next)],
            &[f(-1.0), f(1e-38), f(-1.0)],
            &[f(1.0), f(1.0), f(0.0)],
            &[f(f32::MAX), f(-f32::MAX), f(INF)],
        ],
    );
}

#[test]
fn products_and_fused_sums_round_once() {
    let next = 1.0 + ULP;
    // (1 + u)^2 = 1 + 2u + u^2
    let square = 1.0 + 2.0 * ULP;
    check("mul.rn.f32", 32, &[32, 32], &[&[f(next), f(next), f(square)], &[f(0.0), f(INF), NAN]]);
    check("mul.rp.f32", 32, &[32, 32], &[&[f(next), f(next), f(square + ULP)], &[f(TINY), f(TINY), 1]]);
    check(
        "mul.rz.f32",
        32,
        &[32, 32],
        &[&[f(next), f(next), f(square)], &[f(TINY), f(-TINY), f(-0.0)], &[f(3e38), f(3e38), f(f32::MAX)]],
    );
    check("mul.rm.f32", 32, &[32, 32], &[&[f(TINY), f(-TINY), 0x8000_0001], &[f(TINY), f(TINY), 0]]);
    let fma: &[&[u64]] = &[
        // The sum cancels all terms but u^2. Only a fused operation keeps u^2.
        &[f(next), f(next), f(-square), f(ULP * ULP)],
        &[f(INF), f(0.0), f(1.0), NAN],
        &[f(1.0), f(1.0), f(-1.0), f(0.0)],
    ];
    check("fma.rn.f32", 32, &[32, 32, 32], fma);
    check("mad.rn.f32", 32, &[32, 32, 32], fma);
    check(
        "fma.rz.f32",
        32,
        &[32, 32, 32],
        &[
            &[f(1.0), f(1.0), f(1e-30), f(1.0)],
            &[f(1.0), f(-1.0), f(-1e-30), f(-1.0)],
            &[f(1.0), f(1.0), f(-1e-30), f(1.0 - ULP / 2.0)],
            &[f(next), f(next), f(1e-30), f(square)],
        ],
    );
    check(
        "fma.rp.f32",
        32,
        &[32, 32, 32],
        &[&[f(1.0), f(1.0), f(1e-30), f(next)], &[f(next), f(next), f(-ULP * ULP), f(square)]],
    );
    check(
        "fma.rm.f32",
        32,
        &[32, 32, 32],
        &[&[f(1.0), f(1.0), f(-1e-30), f(1.0 - ULP / 2.0)], &[f(1.0), f(1.0), f(-1.0), f(-0.0)]],
    );
}

#[test]
fn quotients_and_roots_round_as_named() {
    let third = f32::from_bits(0x3eaa_aaab);
    let below = f32::from_bits(0x3eaa_aaaa);
    check(
        "div.rn.f32",
        32,
        &[32, 32],
        &[
            &[f(1.0), f(3.0), f(third)],
            &[f(-1.0), f(0.0), f(-INF)],
            &[f(0.0), f(0.0), NAN],
            &[f(TINY), f(2.0), 0],
            &[f(f32::from_bits(3)), f(2.0), 2],
        ],
    );
    check("div.rz.f32", 32, &[32, 32], &[&[f(1.0), f(3.0), f(below)], &[f(-1.0), f(3.0), f(-below)]]);
    check("div.rp.f32", 32, &[32, 32], &[&[f(1.0), f(3.0), f(third)], &[f(-1.0), f(3.0), f(-below)]]);
    check("div.rm.f32", 32, &[32, 32], &[&[f(1.0), f(-3.0), f(-third)], &[f(6.0), f(3.0), f(2.0)]]);
    check("rcp.rn.f32", 32, &[32], &[&[f(3.0), f(third)], &[f(-0.0), f(-INF)], &[f(INF), f(0.0)]]);
    check("rcp.rz.f32", 32, &[32], &[&[f(3.0), f(below)], &[f(4.0), f(0.25)]]);
    // sqrt(2) = 1.41421356237… lies between 0x3fb504f3 and the next f32.
    check("sqrt.rn.f32", 32, &[32], &[&[f(2.0), 0x3fb5_04f3], &[f(-1.0), NAN], &[f(-0.0), f(-0.0)]]);
    check("sqrt.rp.f32", 32, &[32], &[&[f(2.0), 0x3fb5_04f4], &[f(9.0), f(3.0)]]);
    check("sqrt.rm.f32", 32, &[32], &[&[f(2.0), 0x3fb5_04f3], &[f(9.0), f(3.0)]]);
}

#[test]
fn subnormals_live_without_ftz_and_are_flushed_with_it() {
    check("add.f32", 32, &[32, 32], &[&[f(SUBNORMAL), f(TINY), f(f32::MIN_POSITIVE)]]);
    check(
        "add.ftz.f32",
        32,
        &[32, 32],
        &[
            &[f(SUBNORMAL), f(TINY), 0],
            &[f(-SUBNORMAL), f(-TINY), f(-0.0)],
            &[f(f32::MIN_POSITIVE), f(f32::MIN_POSITIVE), f(2.0 * f32::MIN_POSITIVE)],
        ],
    );
    // `.ftz` flushes operands and the result.
    check("mul.f32", 32, &[32, 32], &[&[f(f32::MIN_POSITIVE), f(0.5), 0x0040_0000]]);
    check(
        "mul.ftz.f32",
        32,
        &[32, 32],
        &[&[f(f32::MIN_POSITIVE), f(0.5), 0], &[f(f32::MIN_POSITIVE), f(-0.5), f(-0.0)]],
    );
    check("mul.rz.ftz.f32", 32, &[32, 32], &[&[f(f32::MIN_POSITIVE), f(0.5), 0], &[f(TINY), f(4.0), 0]]);
    check("fma.rn.ftz.f32", 32, &[32, 32, 32], &[&[f(TINY), f(1e30), f(1.0), f(1.0)]]);
    check("abs.f32", 32, &[32], &[&[f(-TINY), 1], &[f(-INF), f(INF)]]);
    check("abs.ftz.f32", 32, &[32], &[&[f(-TINY), 0]]);
    check("neg.ftz.f32", 32, &[32], &[&[f(TINY), f(-0.0)], &[f(2.0), f(-2.0)]]);
    check("setp.gt.f32", 1, &[32, 32], &[&[f(TINY), f(0.0), 1]]);
    check("setp.gt.ftz.f32", 1, &[32, 32], &[&[f(TINY), f(0.0), 0]]);
}

#[test]
fn saturation_limits_to_0_and_1() {
    check(
        "add.sat.f32",
        32,
        &[32, 32],
        &[
            &[f(0.75), f(0.75), f(1.0)],
            &[f(-3.0), f(1.0), f(0.0)],
            &[f(0.25), f(0.25), f(0.5)],
            // Saturation turns NaN into zero.
            &[f(INF), f(-INF), f(0.0)],
        ],
    );
    check(
        "fma.rn.sat.f32",
        32,
        &[32, 32, 32],
        &[&[f(2.0), f(3.0), f(-5.5), f(0.5)], &[f(2.0), f(3.0), f(0.0), f(1.0)]],
    );
    check("mul.ftz.sat.f32", 32, &[32, 32], &[&[f(f32::MIN_POSITIVE), f(0.5), 0], &[f(3.0), f(3.0), f(1.0)]]);
}

#[test]
fn extrema_prefer_numbers_unless_told() {
    let nan = 0x7fc0_0000;
    check(
        "max.f32",
        32,
        &[32, 32],
        &[
            &[nan, f(1.0), f(1.0)],
            &[f(1.0), nan, f(1.0)],
            &[nan, nan, NAN],
            &[f(-0.0), f(0.0), f(0.0)],
            &[f(0.0), f(-0.0), f(0.0)],
            &[f(-2.0), f(-3.0), f(-2.0)],
        ],
    );
    check(
        "min.f32",
        32,
        &[32, 32],
        &[
            &[nan, f(1.0), f(1.0)],
            &[f(-0.0), f(0.0), f(-0.0)],
            &[f(0.0), f(-0.0), f(-0.0)],
            &[f(INF), f(3.0), f(3.0)],
        ],
    );
    check("max.NaN.f32", 32, &[32, 32], &[&[nan, f(1.0), NAN], &[f(2.0), f(1.0), f(2.0)]]);
    check("min.ftz.f32", 32, &[32, 32], &[&[f(TINY), f(1.0), 0]]);
    check("copysign.f32", 32, &[32, 32], &[&[f(-1.0), f(3.0), f(-3.0)], &[f(1.0), f(-3.0), f(3.0)]]);
}

#[test]
fn comparisons_of_nan_hold_only_with_u() {
    let nan = 0x7fc0_0000;
    for (ordered, unordered) in
        [("lt", "ltu"), ("le", "leu"), ("gt", "gtu"), ("ge", "geu"), ("eq", "equ"), ("ne", "neu")]
    {
        let pair = |name: &str, a, b| {
            results(&format!("setp.{name}.f32 %o, %a, %b;\n"), 1, &[32, 32], &[&[a, b]])[0]
        };
        assert_eq!(pair(ordered, nan, f(1.0)), 0, "{ordered}");
        assert_eq!(pair(unordered, nan, f(1.0)), 1, "{unordered}");
        for (a, b) in [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0), (0.0, -0.0)] {
            assert_eq!(pair(ordered, f(a), f(b)), pair(unordered, f(a), f(b)), "{ordered} {a} {b}");
        }
    }
    check("setp.num.f32", 1, &[32, 32], &[&[nan, f(1.0), 0], &[f(1.0), f(2.0), 1]]);
    check("setp.nan.f32", 1, &[32, 32], &[&[nan, f(1.0), 1], &[f(1.0), f(2.0), 0]]);
    check("setp.lt.f32", 1, &[32, 32], &[&[f(1.0), f(2.0), 1], &[f(2.0), f(1.0), 0]]);
}

/// Asserts that the results of an approximation have a relative error of at most `error`.
fn approximates(instruction: &str, inputs: &[f32], exact: impl Fn(f64) -> f64, error: f64) {
    for chunk in inputs.chunks(32) {
        let cases: Vec<[u64; 1]> = chunk.iter().map(|&x| [f(x)]).collect();
        let cases: Vec<&[u64]> = cases.iter().map(|c| &c[..]).collect();
        let found = results(&format!("{instruction} %o, %a;\n"), 32, &[32], &cases);
        for (&x, found) in chunk.iter().zip(found) {
            let (found, exact) = (f64::from(f32::from_bits(found as u32)), exact(f64::from(x)));
            let off = (found - exact).abs();
            assert!(
                off <= error * exact.abs().max(f64::from(f32::MIN_POSITIVE)),
                "{instruction} of {x}: {found}, not {exact}"
            );
        }
    }
}

#[test]
fn approximations_keep_their_promise() {
    let small: Vec<f32> = (-640..640).map(|i| i as f32 / 5.07).collect();
    approximates("ex2.approx.f32", &small, f64::exp2, 2f64.powi(-22));
    let positive: Vec<f32> = (1..320).map(|i| (i as f32 * 0.37).powi(3)).collect();
    approximates("rcp.approx.f32", &positive, |x| 1.0 / x, 2f64.powi(-22));
    approximates("rsqrt.approx.f32", &positive, |x| 1.0 / x.sqrt(), 2f64.powf(-22.9));
    approximates("sqrt.approx.f32", &positive, f64::sqrt, 2f64.powi(-22));
    // Between 1/2 and 2, PTX bounds the absolute error instead of the relative error.
    let outside: Vec<f32> = positive.iter().copied().filter(|x| !(0.5..=2.0).contains(x)).collect();
    approximates("lg2.approx.f32", &outside, f64::log2, 2f64.powi(-22));
    approximates("tanh.approx.f32", &small, f64::tanh, 2f64.powi(-11));
    check(
        "ex2.approx.f32",
        32,
        &[32],
        &[
            &[f(-INF), 0],
            &[f(INF), f(INF)],
            &[f(0.0), f(1.0)],
            &[f(-126.0), f(f32::MIN_POSITIVE)],
            &[f(-149.0), 1],
            &[f(127.0), f(1.7014118e38)],
            &[0x7fc0_0000, NAN],
        ],
    );
    check("ex2.approx.ftz.f32", 32, &[32], &[&[f(-149.0), 0], &[f(3.0), f(8.0)]]);
    check(
        "lg2.approx.f32",
        32,
        &[32],
        &[
            &[f(0.0), f(-INF)],
            &[f(-1.0), NAN],
            &[f(INF), f(INF)],
            &[f(8.0), f(3.0)],
            &[f(1.0), f(0.0)],
            &[f(TINY), f(-149.0)],
        ],
    );
    check("lg2.approx.ftz.f32", 32, &[32], &[&[f(TINY), f(-INF)]]);
    check(
        "rsqrt.approx.f32",
        32,
        &[32],
        &[&[f(0.0), f(INF)], &[f(-0.0), f(-INF)], &[f(-1.0), NAN], &[f(INF), 0]],
    );
    check("rcp.approx.ftz.f32", 32, &[32], &[&[f(TINY), f(INF)], &[f(2e38), 0]]);
    // In PTX, a divisor above 2^126 gives zero, or NaN if the dividend is infinite.
    check(
        "div.approx.f32",
        32,
        &[32, 32],
        &[
            &[f(6.0), f(3.0), f(2.0)],
            &[f(1e38), f(2e38), 0],
            &[f(-1e38), f(2e38), f(-0.0)],
            &[f(INF), f(2e38), NAN],
        ],
    );
    check("sin.approx.f32", 32, &[32], &[&[f(0.0), f(0.0)], &[f(INF), NAN]]);
    check("cos.approx.f32", 32, &[32], &[&[f(0.0), f(1.0)]]);
}

#[test]
fn doubles() {
    let d = f64::to_bits;
    check("add.f64", 64, &[64, 64], &[&[d(1.0), d(f64::EPSILON / 2.0), d(1.0)]]);
    check("mul.rn.f64", 64, &[64, 64], &[&[d(3.0), d(0.1), d(0.300_000_000_000_000_04)]]);
    check("fma.rn.f64", 64, &[64, 64, 64], &[&[d(0.1), d(10.0), d(-1.0), d(f64::EPSILON / 4.0)]]);
    check("div.rn.f64", 64, &[64, 64], &[&[d(1.0), d(3.0), 0x3fd5_5555_5555_5555]]);
    check("max.f64", 64, &[64, 64], &[&[d(f64::NAN), d(1.0), d(1.0)], &[d(-0.0), d(0.0), d(0.0)]]);
    check("setp.gtu.f64", 1, &[64, 64], &[&[d(f64::NAN), d(1.0), 1], &[d(0.5), d(1.0), 0]]);
}
