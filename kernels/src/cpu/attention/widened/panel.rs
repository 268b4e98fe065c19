//! The loop body that scores and weighted sums share: multiplication of a row of a panel into the sums of some queries.

use crate::cpu::memory::format::Format;
use crate::cpu::simd::Simd;

/// Returns `sums[r][p] + x[r * stride] * panels[p]`, with the even row of a step or, for `ODD`, the odd row.
///
/// # Safety
///
/// `x` is readable for `R` floats at distances of `stride`, and each panel for a step.
#[inline(always)]
pub(super) unsafe fn half_step<S: Simd, W: Format, const ODD: bool, const R: usize, const N: usize>(
    s: S,
    mut sums: [[S::F; N]; R],
    x: *const f32,
    stride: usize,
    panels: [*const W::Raw; N],
) -> [[S::F; N]; R] {
    if const { R > N } {
        let mut rows = [s.splat(0.0); N];
        for (row, panel) in rows.iter_mut().zip(panels) {
            // SAFETY: the caller's contract.
            *row = unsafe { W::load_step::<S, ODD>(s, panel) };
        }
        // Panels are the inner loop, so that one load of an `x` feeds all of them.
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller's contract.
            let x = s.splat(unsafe { *x.add(r * stride) });
            for (sum, row) in sums.iter_mut().zip(rows) {
                *sum = s.fma(x, row, *sum);
            }
        }
        return sums;
    }
    for (p, &panel) in panels.iter().enumerate() {
        // SAFETY: the caller's contract.
        let row = unsafe { W::load_step::<S, ODD>(s, panel) };
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller's contract.
            let x = s.splat(unsafe { *x.add(r * stride) });
            sums[p] = s.fma(x, row, sums[p]);
        }
    }
    sums
}
