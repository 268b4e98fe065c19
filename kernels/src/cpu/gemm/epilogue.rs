//! The operation that is applied to a matrix product's sums as they are stored.

use super::work::Work;
use crate::cpu::memory::Shared;
use crate::cpu::rowwise::SiluMul;
use crate::cpu::sampling::argmax::{PartialArgmax, UpdateArgmax};
use crate::cpu::sampling::mask::RowMasks;
use crate::cpu::simd::{LANES, Op, Simd};

/// The operation that is applied to a matrix product's sums when the sums are stored.
#[derive(Clone, Copy)]
pub(in crate::cpu) enum Epilogue<'a> {
    /// `out = x · Wᵀ (+ bias)`.
    Set(Option<&'a [f32]>),
    /// `out += x · Wᵀ (+ bias)`.
    Add(Option<&'a [f32]>),
    /// `out = silu(x · gateᵀ) * (x · upᵀ)`, for a paired matrix (gate and up). With a bound `l`, the gate is at most
    /// `l` and up is in `-l ..= l`.
    Gated(Option<f32>),
    /// The arg max of each row of `x · Wᵀ`. `out` is scratch memory; its contents are undefined afterwards.
    Largest(PartialArgmax<'a>),
    /// The largest sum of each row and panel, `[rows, panels]`, for a matrix product in int8 whose weights are not
    /// paired. Only the outputs that the row's mask allows count. `out` is scratch memory; its contents are undefined
    /// afterwards.
    PanelMaxima(&'a Shared<'a, f32>, RowMasks<'a>),
}

/// The sums of one gate panel for the rows of a tile.
pub(super) type Gates = [[f32; LANES]; LANES];

impl Work<'_> {
    /// Prefetches the memory of the results of one row and one panel, which other threads may have read or written.
    #[inline(always)]
    pub(super) fn prefetch_results<S: Simd>(&self, s: S, row: usize, panel: usize) {
        let (width, column) = match self.epilogue {
            Epilogue::Set(_) | Epilogue::Add(_) => (self.matrix.shape.outputs, panel * LANES),
            Epilogue::Gated(_) => (self.matrix.shape.outputs / 2, panel / 2 * LANES),
            Epilogue::Largest(_) | Epilogue::PanelMaxima(..) => return,
        };
        s.prefetch_to_write(self.out.as_ptr().wrapping_add(row * width + column).cast_const().cast());
    }

    /// Applies the epilogue to the sums of a tile: `R` rows from `first` on, and `P` panels from `panel` on. If the
    /// matrix is paired, `gates` keeps the sums of a gate panel until the following up panel is finished.
    ///
    /// This function, unlike [`Self::finish`], unrolls the loop over rows, so that the sums stay in registers until
    /// they are stored: a tile of sixteen rows is finished every few thousand cycles.
    #[inline(always)]
    pub(super) fn finish_tile<S: Simd, const R: usize, const P: usize>(
        &self,
        s: S,
        (first, panel): (usize, usize),
        sums: &[[S::F; P]; R],
        gates: &mut Gates,
    ) {
        let outputs = self.matrix.shape.outputs;
        match self.epilogue {
            Epilogue::Set(bias) | Epilogue::Add(bias) if (panel + P) * LANES <= outputs => {
                let add = matches!(self.epilogue, Epilogue::Add(_));
                assert!((first + R) * outputs <= self.out.len(), "results of a tile out of bounds");
                for p in 0..P {
                    let column = (panel + p) * LANES;
                    let bias = bias.map(|bias| s.load_some(&bias[column..column + LANES], 0.0));
                    for (r, sums) in sums.iter().enumerate() {
                        let mut sum = sums[p];
                        if let Some(bias) = bias {
                            sum = s.add(sum, bias);
                        }
                        // SAFETY: the sixteen results are in bounds by the assertion and the guard, and each (row,
                        // panel) belongs to one task.
                        unsafe {
                            let out = self.out.as_ptr().add((first + r) * outputs + column);
                            s.store(out, if add { s.add(s.load(out), sum) } else { sum });
                        }
                    }
                }
            }
            Epilogue::Gated(limit) => {
                for p in 0..P {
                    let is_gate = (panel + p).is_multiple_of(2);
                    let mut ups = [[0.0; LANES]; R];
                    let kept = if is_gate { &mut gates[..R] } else { &mut ups[..] };
                    for (kept, sums) in kept.iter_mut().zip(sums) {
                        s.store_some(kept, sums[p]);
                    }
                    if !is_gate {
                        for (r, (gate, up)) in gates.iter().zip(&ups).enumerate() {
                            self.gate(s, (first + r, panel + p - 1), gate, up, limit);
                        }
                    }
                }
            }
            _ => {
                for (r, sums) in sums.iter().enumerate() {
                    for (p, &sum) in sums.iter().enumerate() {
                        self.finish(s, first + r, panel + p, sum);
                    }
                }
            }
        }
    }

    /// Applies the epilogue, which is not [`Epilogue::Gated`], to the sums of one row and one panel.
    #[inline(always)]
    pub(super) fn finish<S: Simd>(&self, s: S, row: usize, panel: usize, sum: S::F) {
        let (bias, add) = match self.epilogue {
            Epilogue::Set(bias) => (bias, false),
            Epilogue::Add(bias) => (bias, true),
            Epilogue::Gated(_) => unreachable!("one panel of a pair"),
            Epilogue::Largest(partial) => return self.update_argmax(s, partial, row, panel, sum),
            Epilogue::PanelMaxima(..) => unreachable!("maxima of panels that are not in int8"),
        };
        let (outputs, column) = (self.matrix.shape.outputs, panel * LANES);
        let width = LANES.min(outputs - column);
        // SAFETY: each (row, panel) belongs to one task, so no other task accesses these results.
        let out = unsafe { self.out.slice_mut(row * outputs + column, width) };
        let mut sum = sum;
        if let Some(bias) = bias {
            sum = s.add(sum, s.load_some(&bias[column..column + width], 0.0));
        }
        if add {
            sum = s.add(s.load_some(out, 0.0), sum);
        }
        s.store_some(out, sum);
    }

    /// Updates the row's arg max with the logits of one panel.
    #[inline(always)]
    fn update_argmax<S: Simd>(&self, s: S, partial: PartialArgmax<'_>, row: usize, panel: usize, sum: S::F) {
        let (thread, first) = (self.thread, panel * LANES);
        let mut lanes = [0.0; LANES];
        s.store_some(&mut lanes, sum);
        let logits = &lanes[..LANES.min(self.matrix.shape.outputs - first)];
        s.call(UpdateArgmax { partial, thread, row, first, logits });
    }

    /// Computes the results of a row and a pair of panels (gate panel `pair` and the up panel after it) from their
    /// sums, and stores the results.
    #[inline(always)]
    pub(super) fn gate<S: Simd>(
        &self,
        s: S,
        (row, pair): (usize, usize),
        gate: &[f32; LANES],
        up: &[f32; LANES],
        limit: Option<f32>,
    ) {
        let out = self.gated(row, pair / 2);
        SiluMul { gate: &gate[..out.len()], up: &up[..out.len()], limit, out }.run(s);
    }

    /// Returns the part of `out` that holds the results of one row and one pair of panels.
    #[allow(clippy::mut_from_ref)] // Tasks hold disjoint slices: see `Shared::slice_mut`.
    #[inline(always)]
    fn gated(&self, row: usize, pair: usize) -> &mut [f32] {
        let (gates, column) = (self.matrix.shape.outputs / 2, pair * LANES);
        // SAFETY: each (row, pair of panels) belongs to one task, so no other task accesses these results. The task
        // holds one such slice at a time.
        unsafe { self.out.slice_mut(row * gates + column, LANES.min(gates - column)) }
    }
}
