//! Products of a single tile of rows: bound by memory, from which weights are read in a few streams.

use super::super::format::{Format, STEP};
use super::super::simd::{Op, Simd};
use super::super::tile::{for_tile, prefetch};
use super::{Work, multiply};

/// Steps that weights are asked for ahead of their use.
const AHEAD: usize = 24;

/// Some panels by all rows, which are one tile; `DOTS` where the door holds bfloat16 pairs.
#[derive(Clone, Copy)]
pub(super) struct Sweep<'a, W: Format, const DOTS: bool> {
    pub(super) work: Work<'a>,
    pub(super) data: &'a [W::Raw],
    pub(super) panels: (usize, usize),
}

impl<W: Format, const DOTS: bool> Op for Sweep<'_, W, DOTS> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (_, rows) = self.work.tiling.tile(0);
        for_tile!(S, rows, s.call(OfRows::<W, DOTS, R, P>(self)));
    }
}

/// A sweep of `R` rows, `P` panels at once.
struct OfRows<'a, W: Format, const DOTS: bool, const R: usize, const P: usize>(Sweep<'a, W, DOTS>);

impl<W: Format, const DOTS: bool, const R: usize, const P: usize> Op for OfRows<'_, W, DOTS, R, P> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (mut panel, end) = self.0.panels;
        while panel + P <= end {
            self.0.tile::<S, R, P>(s, panel);
            panel += P;
        }
        while panel < end {
            self.0.tile::<S, R, 1>(s, panel);
            panel += 1;
        }
    }
}

impl<W: Format, const DOTS: bool> Sweep<'_, W, DOTS> {
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const P: usize>(&self, s: S, panel: usize) {
        let steps = self.work.matrix.steps();
        let data = &self.data[panel * steps * STEP..(panel + P) * steps * STEP];
        let mut panels = [data.as_ptr(); P];
        for (p, panel) in panels.iter_mut().enumerate() {
            *panel = data[p * steps * STEP..].as_ptr();
        }
        // What is needed some steps later: of these panels or, at their end, of the `P` after them, where the machine's
        // own prefetching would have to find its streams anew.
        let ask = |p: usize, step: usize| {
            let ahead = step + AHEAD;
            let ahead = if ahead < steps { ahead } else { ahead + (P - 1) * steps };
            prefetch(s, panels[p].wrapping_add(ahead * STEP), STEP);
        };
        let zeros = [[s.splat(0.0); P]; R];
        // SAFETY: the door holds `2 * steps` inputs of every row, tile by tile, and was filled before; nobody writes
        // to it now. The panels hold `steps` steps by the slice above.
        let sums = unsafe {
            let x = self.work.inputs::<DOTS, R>(0, 0);
            multiply::<S, W, DOTS, R, P>(s, zeros, x, panels, steps, ask)
        };
        for (row, sums) in sums.iter().enumerate() {
            for (p, &sum) in sums.iter().enumerate() {
                self.work.finish(s, row, panel + p, sum);
            }
        }
    }
}
