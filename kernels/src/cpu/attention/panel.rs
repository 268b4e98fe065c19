//! What scores and weighted sums have in common: a row of a panel, multiplied into the sums of some queries.

use super::super::format::{Format, STEP};
use super::super::simd::Simd;

/// `sums[r][p] += x[r * stride] * panels[p]`, with the even row of a step or, for `ODD`, the odd one.
///
/// # Safety
///
/// `x` is readable for `R` floats `stride` apart, and each of the panels for a step.
#[inline(always)]
pub(super) unsafe fn half_step<S: Simd, W: Format, const ODD: bool, const R: usize, const N: usize>(
    s: S,
    sums: &mut [[S::F; N]; R],
    x: *const f32,
    stride: usize,
    panels: [*const W::Raw; N],
) {
    for (p, &panel) in panels.iter().enumerate() {
        // SAFETY: the caller's contract.
        let row = unsafe { W::load_step::<S, ODD>(s, panel) };
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller's contract.
            let x = s.splat(unsafe { *x.add(r * stride) });
            sums[p] = s.fma(x, row, sums[p]);
        }
    }
}

/// Asks for a step of a panel; only a hint, so any address will do.
#[inline(always)]
pub(super) fn prefetch<S: Simd, W: Format>(s: S, step: *const W::Raw) {
    const LINE: usize = 64;
    for line in 0..(STEP * size_of::<W::Raw>()).div_ceil(LINE) {
        s.prefetch(step.cast::<u8>().wrapping_add(line * LINE));
    }
}
