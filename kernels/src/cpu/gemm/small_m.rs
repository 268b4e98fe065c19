//! Matrix products of a single tile of rows. Their speed is bound by the memory's bandwidth. They read the weights in a
//! few streams, one per panel that is multiplied at once.

use super::epilogue::Gates;
use super::micro_kernel::{Data, MicroKernel};
use super::work::Work;
use crate::cpu::gemm::tile::{for_tile, prefetch};
use crate::cpu::memory::format::STEP;
use crate::cpu::simd::{LANES, Op, Simd};

/// Prefetch distance in lines, divided among the panels that are read at once.
const AHEAD: usize = 96;

/// One task: the matrix product of all rows, which are one tile, and panels `panels.0..panels.1`.
#[derive(Clone, Copy)]
pub(super) struct SmallM<'a, K: MicroKernel> {
    pub(super) work: Work<'a>,
    pub(super) data: Data<'a, K>,
    pub(super) panels: (usize, usize),
}

impl<K: MicroKernel> Op for SmallM<'_, K> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (first, rows) = self.work.tiling.tile(0);
        for_tile!(single S, rows, s.call(OfRows::<K, R, P>(self, first)));
    }
}

/// The matrix product of `R` rows, computed `P` panels at a time. The second field is the index of the first row.
struct OfRows<'a, K: MicroKernel, const R: usize, const P: usize>(SmallM<'a, K>, usize);

impl<K: MicroKernel, const R: usize, const P: usize> Op for OfRows<'_, K, R, P> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (mut panel, end) = self.0.panels;
        let mut gates = [[0.0; LANES]; LANES];
        while panel + P <= end {
            self.0.tile::<S, R, P>(s, (self.1, panel), &mut gates);
            panel += P;
        }
        while panel < end {
            self.0.tile::<S, R, 1>(s, (self.1, panel), &mut gates);
            panel += 1;
        }
    }
}

impl<K: MicroKernel> SmallM<'_, K> {
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const P: usize>(
        &self,
        s: S,
        (first, panel): (usize, usize),
        gates: &mut Gates,
    ) {
        let steps = self.work.matrix.shape.steps();
        let lines = K::lines(steps);
        let mut panels = [self.data.elements.as_ptr(); P];
        for (p, at) in panels.iter_mut().enumerate() {
            *at = self.data.steps(panel + p, 0, steps);
        }
        // Prefetches later lines of these panels. Near the panels' ends, it prefetches the next `P` panels, because the
        // hardware prefetcher has not detected their streams yet.
        let ask = |p: usize, line: usize| {
            let ahead = line + AHEAD / P;
            let ahead = if ahead < lines { ahead } else { ahead + (P - 1) * lines };
            prefetch(s, panels[p].wrapping_add(ahead * STEP), STEP);
        };
        for row in 0..R {
            (0..P).for_each(|p| self.work.prefetch_results(s, first + row, panel + p));
        }
        let zeros = [[s.splat(0.0); P]; R];
        // SAFETY: the packed activations hold `2 * steps` inputs of every row, and no task writes to them now.
        // [`Data::steps`] has checked that each panel holds `steps` steps.
        let sums = unsafe {
            let x = self.work.inputs::<K, R>(first, 0);
            K::multiply::<S, R, P>(s, zeros, x, panels, steps, ask)
        };
        self.work.finish_tile(s, (first, panel), &sums, gates);
    }
}
