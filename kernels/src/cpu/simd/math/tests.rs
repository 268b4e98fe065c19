use super::super::isa::{Path, testable};
use super::super::{LANES, Op};
use super::*;

struct Exp<'a>(&'a [f32], &'a mut Vec<f32>);
impl Op for Exp<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for chunk in self.0.chunks(LANES) {
            let mut lanes = [0.0; LANES];
            s.store_some(&mut lanes, exp(s, s.load_some(chunk, 0.0)));
            self.1.extend_from_slice(&lanes[..chunk.len()]);
        }
    }
}

#[test]
fn exp_is_within_two_units_in_the_last_place() {
    let inputs: Vec<f32> = (-87_000..88_000).step_by(7).map(|i| i as f32 * 1e-3 + 1e-5).collect();
    for isa in testable("exp") {
        let mut got = Vec::new();
        Path::new(isa).unwrap().run(Exp(&inputs, &mut got));
        for (x, y) in inputs.iter().zip(&got) {
            let want = f64::from(*x).exp();
            let error = (f64::from(*y) - want).abs() / want;
            assert!(error < 2.5e-7, "{isa}: exp({x}) = {y}, wanted {want}");
        }
    }
}

#[test]
fn exp_of_the_edges() {
    let inputs = [0.0, -0.0, f32::NEG_INFINITY, -1e30, -87.5, f32::INFINITY, 1e30, f32::NAN];
    for isa in testable("exp edges") {
        let mut got = Vec::new();
        Path::new(isa).unwrap().run(Exp(&inputs, &mut got));
        assert_eq!(&got[..7], &[1.0, 1.0, 0.0, 0.0, 0.0, f32::INFINITY, f32::INFINITY], "{isa}");
        assert!(got[7].is_nan(), "{isa}");
    }
}
