//! The loop body that scores and weighted sums share: it multiplies a row of a panel by one number per query, and adds
//! the products to the queries' sums.

use crate::cpu::memory::format::Format;
use crate::cpu::simd::Simd;

/// Returns `sums[r][p] + x[r * stride] * panels[p]`, where `panels[p]` stands for the odd row of the panel's current
/// step (a pair of rows) if `ODD` is true, and for the even row otherwise.
///
/// # Safety
///
/// `x` is readable for `R` floats at distances of `stride`, and each panel is readable for one step.
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
            // SAFETY: by the caller's contract, the panel is readable for one step.
            *row = unsafe { W::load_step::<S, ODD>(s, panel) };
        }
        // The loop over panels is the inner one, so that each `x` is loaded once and used for all panels.
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: by the caller's contract, `x` is readable for `R` floats at distances of `stride`.
            let x = s.splat(unsafe { *x.add(r * stride) });
            for (sum, row) in sums.iter_mut().zip(rows) {
                *sum = s.fma(x, row, *sum);
            }
        }
        return sums;
    }
    for (p, &panel) in panels.iter().enumerate() {
        // SAFETY: by the caller's contract, the panel is readable for one step.
        let row = unsafe { W::load_step::<S, ODD>(s, panel) };
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: by the caller's contract, `x` is readable for `R` floats at distances of `stride`.
            let x = s.splat(unsafe { *x.add(r * stride) });
            sums[p] = s.fma(x, row, sums[p]);
        }
    }
    sums
}
