use super::*;
use crate::cpu::simd::isa::{Path, testable};

/// Runs every lane operation of a path, to compare it with scalar arithmetic.
struct Lanes<'a>(&'a [f32; 16], &'a [f32; 16], &'a [u16; 32]);
impl Op for Lanes<'_> {
    type Output = Vec<[f32; 16]>;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Vec<[f32; 16]> {
        let (a, b) = (s.load_some(self.0, 0.0), s.load_some(self.1, 0.0));
        let w = self.2.as_ptr();
        // SAFETY: `w` points to thirty-two elements.
        let raw = unsafe {
            [
                s.load_f16(w),
                s.load_bf16(w),
                s.load_bf16_even(w),
                s.load_bf16_odd(w),
                s.dot_bf16(a, w, 0x3f80_4000),
            ]
        };
        let sums = [s.splat(s.sum(a)), s.splat(s.largest(a)), s.splat(f32::from(s.any_nan(a)))];
        let all = [
            s.add(a, b),
            s.sub(a, b),
            s.mul(a, b),
            s.div(a, b),
            s.fma(a, b, a),
            s.max(a, b),
            s.less(a, b, s.splat(1.0), s.splat(2.0)),
            s.round(a),
            s.exp2_integer(s.round(a)),
            s.round_to_bf16(s.mul(a, s.splat(1.0 / 3.0))),
        ];
        all.into_iter()
            .chain(raw)
            .chain(sums)
            .map(|x| {
                let mut lanes = [0.0; 16];
                s.store_some(&mut lanes, x);
                lanes
            })
            .collect()
    }
}

#[test]
fn lanes_do_what_scalars_do() {
    let a: [f32; 16] = std::array::from_fn(|i| (i as f32 - 7.5) * 1.25);
    let b: [f32; 16] = std::array::from_fn(|i| ((i * 7) % 16) as f32 - 3.0);
    let w: [u16; 32] = std::array::from_fn(|i| to_bf16(i as f32 * 0.5 - 4.0));
    let each = |f: &dyn Fn(usize) -> f32| -> [f32; 16] { std::array::from_fn(f) };
    // 0x3f80_4000: the odd element is 1, the even element is 2.
    let want = [
        each(&|i| a[i] + b[i]),
        each(&|i| a[i] - b[i]),
        each(&|i| a[i] * b[i]),
        each(&|i| a[i] / b[i]),
        each(&|i| a[i] * b[i] + a[i]),
        each(&|i| a[i].max(b[i])),
        each(&|i| if a[i] < b[i] { 1.0 } else { 2.0 }),
        each(&|i| a[i].round_ties_even()),
        each(&|i| a[i].round_ties_even().exp2()),
        each(&|i| from_bf16(to_bf16(a[i] * (1.0 / 3.0)))),
        each(&|i| half::f16::from_bits(w[i]).to_f32()),
        each(&|i| from_bf16(w[i])),
        each(&|i| from_bf16(w[2 * i])),
        each(&|i| from_bf16(w[2 * i + 1])),
        each(&|i| a[i] + from_bf16(w[2 * i + 1]) + 2.0 * from_bf16(w[2 * i])),
        [a.iter().sum(); 16],
        [a[15]; 16],
        [0.0; 16],
    ];
    for isa in testable("lanes") {
        let got = Path::new(isa).unwrap().run(Lanes(&a, &b, &w));
        for (index, (got, want)) in got.iter().zip(&want).enumerate() {
            let equal = got.iter().zip(want).all(|(g, w)| g == w || (g.is_nan() && w.is_nan()));
            assert!(equal, "{isa}: operation {index}: {got:?}, wanted {want:?}");
        }
        let mut nan = a;
        nan[11] = f32::NAN;
        assert_eq!(Path::new(isa).unwrap().run(Lanes(&nan, &b, &w))[17], [1.0; 16], "{isa}");
    }
}

struct RoundToBf16([f32; 16]);
impl Op for RoundToBf16 {
    type Output = [f32; 16];
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [f32; 16] {
        let mut lanes = [0.0; 16];
        s.store_some(&mut lanes, s.round_to_bf16(s.load_some(&self.0, 0.0)));
        lanes
    }
}

#[test]
fn bf16_rounds_to_nearest_even() {
    let isas = testable("rounding to bfloat16");
    for (bits, want) in [
        (0x3f80_0000, 0x3f80),
        (0x3f80_8000, 0x3f80),
        (0x3f81_8000, 0x3f82),
        (0x3f80_8001, 0x3f81),
        (0x7f7f_ffff, 0x7f80),
        (0xff80_0000, 0xff80),
        (0x8000_0000, 0x8000),
        (0x7f80_0001, 0x7fc0),
    ] {
        assert_eq!(to_bf16(f32::from_bits(bits)), want, "{bits:#x}");
        for &isa in &isas {
            let lanes = Path::new(isa).unwrap().run(RoundToBf16([f32::from_bits(bits); 16]));
            assert_eq!(lanes.map(f32::to_bits), [u32::from(want) << 16; 16], "{isa}: {bits:#x}");
        }
    }
}

/// Converts thirty-two codes from `self.0` on to bfloat16.
struct ToBf16(u8);
impl Op for ToBf16 {
    type Output = [u16; 32];
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [u16; 32] {
        let (codes, mut out): ([u8; 32], _) = (std::array::from_fn(|i| self.0 + i as u8), [0; 32]);
        // SAFETY: there are thirty-two codes, and room for as many numbers.
        unsafe { s.e4m3_to_bf16(codes.as_ptr(), out.as_mut_ptr()) };
        out
    }
}

#[test]
fn all_e4m3_are_the_same_numbers_in_bf16() {
    for isa in testable("e4m3 to bfloat16") {
        for first in (0..=255u8).step_by(32) {
            for (i, got) in Path::new(isa).unwrap().run(ToBf16(first)).into_iter().enumerate() {
                let (got, want) = (from_bf16(got), crate::e4m3::value(first + i as u8));
                let equal = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                assert!(equal, "{isa}: {:#x} is {got}, wanted {want}", first + i as u8);
            }
        }
    }
}

/// Converts thirty-two codes from `self.0` on to f16.
struct ToF16(u8);
impl Op for ToF16 {
    type Output = [u16; 32];
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [u16; 32] {
        let (codes, mut out): ([u8; 32], _) = (std::array::from_fn(|i| self.0 + i as u8), [0; 32]);
        // SAFETY: there are thirty-two codes, and room for as many numbers.
        unsafe { s.e4m3_pairs_to_f16(codes.as_ptr(), out.as_mut_ptr()) };
        out
    }
}

#[test]
fn all_e4m3_are_the_same_numbers_in_f16() {
    for isa in testable("e4m3 to f16") {
        for first in (0..=255u8).step_by(32) {
            for (i, got) in Path::new(isa).unwrap().run(ToF16(first)).into_iter().enumerate() {
                let code = first + (2 * (i % 16) + i / 16) as u8;
                let (got, want) =
                    (half::f16::from_bits(got).to_f32() * F16_PER_E4M3, crate::e4m3::value(code));
                let equal = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                assert!(equal, "{isa}: {code:#x} is {got}, wanted {want}");
            }
        }
    }
}

/// Widens the first of every four of sixty-four codes, each in three ways, and looks its lowest bits up in a table.
struct Widened<'a>(&'a [u8; 64], &'a [f32; 16]);
impl Op for Widened<'_> {
    type Output = [[f32; 16]; 4];
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [[f32; 16]; 4] {
        // SAFETY: there are sixty-four codes.
        let (words, bytes) = unsafe { (s.load_i(self.0.as_ptr().cast()), s.load_u8(self.0.as_ptr())) };
        let found = s.look_up(s.load_some(self.1, 0.0), s.shift_right(words, 8));
        [s.widen_e4m3(words), s.widen_i8(words), bytes, found].map(|x| {
            let mut lanes = [0.0; 16];
            s.store_some(&mut lanes, x);
            lanes
        })
    }
}

#[test]
fn all_codes_are_widened_exactly() {
    let table: [f32; 16] = std::array::from_fn(|i| (i as f32).sqrt());
    for isa in testable("codes") {
        for first in (0..=255u8).step_by(16) {
            let codes: [u8; 64] = std::array::from_fn(|i| first.wrapping_add((i / 4 + 5 * (i % 4)) as u8));
            let [floats, integers, bytes, found] = Path::new(isa).unwrap().run_int8(Widened(&codes, &table));
            for lane in 0..16 {
                let code = codes[4 * lane];
                let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
                let magnitude =
                    if exponent == 0 { mantissa / 64.0 } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) };
                let want = if code & 0x80 == 0 { magnitude } else { -magnitude };
                if code & 0x7f != 0x7f {
                    assert_eq!(floats[lane].to_bits(), want.to_bits(), "{isa}: {code:#x}");
                    assert_eq!(e4m3(code).to_bits(), want.to_bits(), "{code:#x}");
                }
                assert_eq!(integers[lane], f32::from(code.cast_signed()), "{isa}: {code:#x}");
                assert_eq!(bytes[lane], f32::from(codes[lane]), "{isa}: {code:#x}");
                assert_eq!(found[lane], table[usize::from(codes[4 * lane + 1] & 15)], "{isa}: {code:#x}");
            }
        }
    }
}
