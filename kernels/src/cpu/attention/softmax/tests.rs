use super::*;
use crate::cpu::simd::Op;
use crate::cpu::simd::isa::{Path, testable};

struct Exp2<'a>(&'a [f32], &'a mut Vec<f32>);
impl Op for Exp2<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for chunk in self.0.chunks(LANES) {
            let mut lanes = [0.0; LANES];
            s.store_some(&mut lanes, exp2(s, s.load_some(chunk, 0.0)));
            self.1.extend_from_slice(&lanes[..chunk.len()]);
        }
    }
}

#[test]
fn exp2_is_near_the_true_one() {
    let inputs: Vec<f32> = (-125_999..=0).step_by(7).map(|i| i as f32 * 1e-3).collect();
    for isa in testable("exp2") {
        let mut got = Vec::new();
        Path::new(isa).unwrap().run(Exp2(&inputs, &mut got));
        for (x, y) in inputs.iter().zip(&got) {
            let want = f64::from(*x).exp2();
            let error = (f64::from(*y) - want).abs() / want;
            assert!(error < 2.5e-7, "{isa}: 2^{x} = {y}, wanted {want}");
        }
    }
}

#[test]
fn exp2_of_the_edges() {
    for isa in testable("exp2 edges") {
        let mut got = Vec::new();
        let inputs = [0.0, -0.0, f32::NEG_INFINITY, -1e30, -126.5, f32::NAN];
        Path::new(isa).unwrap().run(Exp2(&inputs, &mut got));
        assert_eq!(&got[..5], &[1.0, 1.0, 0.0, 0.0, 0.0], "{isa}");
        assert!(got[5].is_nan(), "{isa}");
    }
}
