use super::*;
use crate::cpu::simd::Op;
use crate::cpu::simd::isa::{Path, testable};
use crate::cpu::testing::Random;

struct Quantise<'a>(&'a [f32]);
impl Op for Quantise<'_> {
    type Output = (f32, [i8; GROUP]);
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, [i8; GROUP]) {
        let mut out = [55; GROUP];
        (quantise(s, self.0, &mut out), out)
    }
}

#[test]
fn every_path_quantises_to_the_nearest_step() {
    let mut random = Random::new(5);
    for isa in testable("quantise") {
        let path = Path::new(isa).unwrap();
        for len in [1, 3, 16, 33, 127, GROUP] {
            for deviation in [1e-25, 1e-3, 1.0, 1e30] {
                let x = random.normals(len, deviation);
                let largest = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                let (scale, q) = path.run_int8(Quantise(&x));
                assert_eq!(scale, largest / 127.0, "{isa}");
                for (i, x) in x.iter().enumerate() {
                    let want = (x * (127.0 / largest)).round_ties_even();
                    assert_eq!(f32::from(q[i]), want, "{isa}: {x} of at most {largest}");
                }
                assert!(q[len..].iter().all(|q| *q == 0), "{isa}: padding");
                assert!(q.iter().any(|q| q.unsigned_abs() == 127), "{isa}: the range is used");
            }
        }
    }
}

struct InRegisters<'a>(&'a [f32]);
impl Op for InRegisters<'_> {
    type Output = (f32, i32, Vec<u32>);
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let mut lanes = [s.splat(0.0); GROUP / LANES];
        for (lanes, x) in lanes.iter_mut().zip(self.0.chunks(LANES)) {
            *lanes = s.load_some(x, 0.0);
        }
        let Quantised { scale, sum, words } = quantise_lanes(s, lanes);
        let mut stored = vec![0; GROUP / S::DOT_INPUTS];
        for (words, to) in words.iter().zip(stored.chunks_exact_mut(LANES)) {
            // SAFETY: the destination has room for sixteen words.
            unsafe { s.store_i(to.as_mut_ptr(), *words) };
        }
        (scale, sum, stored)
    }
}

struct Words<'a>(&'a [i8; GROUP]);
impl Op for Words<'_> {
    type Output = Vec<u32>;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> Vec<u32> {
        self.0.chunks_exact(S::DOT_INPUTS).map(S::dot_word).collect()
    }
}

#[test]
fn a_group_in_registers_comes_to_the_same_numbers() {
    let mut random = Random::new(6);
    for isa in testable("quantise in registers") {
        let path = Path::new(isa).unwrap();
        for len in [1, 20, 64, 100, GROUP] {
            for deviation in [0.0, 1e-35, 1e-3, 1.0, 1e30] {
                let x = random.normals(len, deviation);
                let (want_scale, q) = path.run_int8(Quantise(&x));
                let (scale, sum, words) = path.run_int8(InRegisters(&x));
                assert_eq!(scale, want_scale, "{isa} {len} {deviation}");
                assert_eq!(sum, q.iter().map(|&q| i32::from(q)).sum::<i32>(), "{isa} {len} {deviation}");
                assert_eq!(words, path.run_int8(Words(&q)), "{isa} {len} {deviation}");
            }
        }
        let bad = path.run_int8(InRegisters(&[1.0, f32::NAN, 2.0]));
        assert!(bad.0.is_nan(), "{isa}");
    }
}

#[test]
fn nothing_is_zero_and_what_is_not_finite_poisons_the_scale() {
    for isa in testable("quantise") {
        let path = Path::new(isa).unwrap();
        for tiny in [0.0, -0.0, 1e-40, -9e-31] {
            assert_eq!(path.run_int8(Quantise(&[tiny; 20])), (0.0, [0; GROUP]), "{isa}: {tiny}");
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for rest in [0.0, 3.0] {
                let mut x = [rest; 40];
                x[37] = bad;
                assert!(path.run_int8(Quantise(&x)).0.is_nan(), "{isa}: {bad} among {rest}");
            }
        }
    }
}
