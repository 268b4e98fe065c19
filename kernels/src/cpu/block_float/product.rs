//! The innermost loop: a tile of `R` rows by `P` panels, span by span.

use super::super::format::STEP;
use super::super::simd::{LANES, Simd};
use super::SPAN_STEPS;

/// What a tile and a panel are to be multiplied by, from the span on that a product begins with.
#[derive(Clone, Copy)]
pub(in super::super) struct Factors<const P: usize> {
    /// `[spans, R]`.
    pub(in super::super) x: *const f32,
    /// Exponents: `[spans, 16]` each.
    pub(in super::super) panels: [*const u8; P],
}

/// `sums` with, to each `[r][p]`, sixteen lanes of `Σ x[r][i] * panel[p][i][lane]` over `2 * steps` inputs, which begin with
/// a span. `x` holds pairs, row `r` of step `i` at `i * R + r`. In each step `ask(p, step)` asks for what will be wanted
/// later.
///
/// # Safety
///
/// `x` is readable for `R * steps` pairs, every panel for `steps` steps, and the factors for as many spans.
#[inline(always)]
pub(in super::super) unsafe fn product_on<S: Simd, const R: usize, const P: usize>(
    s: S,
    mut sums: [[S::F; P]; R],
    x: *const u32,
    panels: [*const u16; P],
    factors: Factors<P>,
    steps: usize,
    ask: impl Fn(usize, usize),
) -> [[S::F; P]; R] {
    for (span, first) in (0..steps).step_by(SPAN_STEPS).enumerate() {
        let mut dots = [[s.splat_i(0); P]; R];
        for step in first..steps.min(first + SPAN_STEPS) {
            (0..P).for_each(|p| ask(p, step));
            for p in 0..P {
                // SAFETY: the caller's contract.
                let weights = unsafe { s.load_i(panels[p].add(step * STEP)) };
                for (r, dots) in dots.iter_mut().enumerate() {
                    // SAFETY: the caller's contract.
                    let pair = unsafe { *x.add(step * R + r) };
                    dots[p] = s.dot_i16(dots[p], weights, pair);
                }
            }
        }
        for p in 0..P {
            // SAFETY: the caller's contract.
            let of_panel = unsafe { s.powers(factors.panels[p].add(span * LANES)) };
            for (r, sums) in sums.iter_mut().enumerate() {
                // SAFETY: the caller's contract.
                let of_row = s.splat(unsafe { *factors.x.add(span * R + r) });
                // The product of powers of two is exact, and so is that with a sum: fused or not is the same.
                sums[p] = s.fma(s.floats(dots[r][p]), s.mul(of_panel, of_row), sums[p]);
            }
        }
    }
    sums
}
