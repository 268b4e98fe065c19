use super::*;
use crate::cpu::simd::Op;
use crate::cpu::simd::isa::{Path, testable};

const HEAD_DIM: usize = LANES;

struct Merge<'t, 'a>(&'t mut Partial<'a>, &'t Partial<'t>);
impl Op for Merge<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.0.merge(s, self.1);
    }
}

/// A query may have seen no key in two successive ranges.
#[test]
fn nothing_and_nothing_is_nothing() {
    for isa in testable("empty partials") {
        let path = Path::new(isa).unwrap();
        let mut floats =
            [vec![f32::NAN; Partial::floats(1, HEAD_DIM)], vec![f32::NAN; Partial::floats(1, HEAD_DIM)]];
        let [one, two] = &mut floats;
        let (mut one, mut two) = (Partial::new(one, 1, HEAD_DIM), Partial::new(two, 1, HEAD_DIM));
        one.clear();
        two.clear();
        path.run(Merge(&mut one, &two));
        assert_eq!((one.largest[0], one.total[0]), (f32::NEG_INFINITY, 0.0), "{isa}");
        assert_eq!(one.sums, [0.0; HEAD_DIM], "{isa}");
        // A result merged into an empty one is copied, and an empty one merged into a result changes nothing.
        (two.largest[0], two.total[0], two.sums[0], two.sums[1]) = (-3.0, 1.5, -0.0, 0.3);
        path.run(Merge(&mut one, &two));
        two.clear();
        path.run(Merge(&mut one, &two));
        assert_eq!((one.largest[0], one.total[0]), (-3.0, 1.5), "{isa}");
        assert_eq!((one.sums[0].to_bits(), one.sums[1]), ((-0.0_f32).to_bits(), 0.3), "{isa}");
    }
}
