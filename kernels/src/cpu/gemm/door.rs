//! The way of activations into a product: tiles of rows, rounded as the weights want them.

use super::super::block_float::{SPAN, SPAN_STEPS, span};
use super::super::input::{Input, InputRow};
use super::super::isa::Path;
use super::super::memory::Shared;
use super::super::pool::ThreadPool;
use super::super::simd::{LANES, Op, Simd};
use super::super::tile::{Tiling, for_tile};
use super::way::Layout;
use crate::DeviceError;

/// Elements that one task takes: fewer are not worth another thread's attention.
const TASK_ELEMENTS: usize = 8 << 10;

/// The way of all rows through the door.
#[derive(Clone, Copy)]
pub(super) struct Door<'a> {
    pub(super) x: Input<'a>,
    pub(super) inputs: usize,
    pub(super) tiling: Tiling,
    pub(super) layout: Layout,
}

impl Door<'_> {
    /// Lays all rows out in `to`: of each tile, its rows side by side for each input, or for each pair of inputs, and in the
    /// second half of its room for each span's power of two. An odd input is followed by zeros.
    pub(super) fn pass(
        self,
        path: Path,
        pool: &mut ThreadPool,
        to: &Shared<'_, f32>,
    ) -> Result<(), DeviceError> {
        let (_, rows) = self.tiling.tile(0);
        let share = (TASK_ELEMENTS / rows.max(1)).next_multiple_of(SPAN);
        let shares = self.inputs.div_ceil(share);
        pool.run(self.tiling.tiles * shares, |task, _| {
            let (tile, first) = (task / shares, task % shares * share);
            let inputs = (first, self.inputs.min(first + share));
            path.run(Part { door: self, tile, inputs, to });
        })
    }
}

/// Some inputs of a tile's rows.
struct Part<'a, 'b> {
    door: Door<'a>,
    tile: usize,
    inputs: (usize, usize),
    to: &'b Shared<'b, f32>,
}

impl Op for Part<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (_, rows) = self.door.tiling.tile(self.tile);
        for_tile!(S, rows, self.lay_out::<S, R, P>(s));
    }
}

impl Part<'_, '_> {
    /// `P` is of no use here: what goes with `R` in [`for_tile`].
    #[inline(always)]
    fn lay_out<S: Simd, const R: usize, const P: usize>(&self, s: S) {
        let Door { x, inputs, tiling, layout } = self.door;
        let (first_row, _) = tiling.tile(self.tile);
        let padded = 2 * inputs.div_ceil(2);
        let (first, end) = self.inputs;
        let last_end = if end == inputs { padded } else { end };
        // An element of pairs is two inputs of a row.
        let per_element = if matches!(layout, Layout::Pairs | Layout::Spans) { 2 } else { 1 };
        let start = first_row * padded + first * R / per_element;
        let len = (last_end - first) * R / per_element;
        // SAFETY: each part of each tile has a place of its own.
        let to = unsafe { self.to.part(start, len) };
        let rows = x.rows::<S, R>(s, first_row, inputs);
        if layout == Layout::Spans {
            let start = first_row * padded + (padded / 2 + first / SPAN) * R;
            // SAFETY: as above: in the second half of the tile's room, which has place for a power every two inputs.
            let powers = unsafe { self.to.part(start, (last_end - first).div_ceil(SPAN) * R) };
            return lay_out_spans::<S, R>(s, &rows, first, to, powers);
        }
        let narrow = matches!(layout, Layout::Rounded | Layout::Pairs);
        for (block, to) in to.chunks_mut(LANES * R / per_element).enumerate() {
            let from = first + block * LANES;
            let mut lanes = [[0.0f32; LANES]; R];
            for (row, lanes) in rows.iter().zip(&mut lanes) {
                let x = row.load(s, from);
                let x = if narrow { s.round_to_bf16(x) } else { x };
                s.store_some(lanes, x);
            }
            if layout == Layout::Pairs {
                for (pair, to) in to.chunks_exact_mut(R).enumerate() {
                    for (row, to) in to.iter_mut().enumerate() {
                        let even = lanes[row][2 * pair].to_bits();
                        let odd = lanes[row][2 * pair + 1].to_bits();
                        *to = f32::from_bits(even >> 16 | odd);
                    }
                }
            } else {
                for (input, to) in to.chunks_exact_mut(R).enumerate() {
                    to.iter_mut().zip(&lanes).for_each(|(to, lanes)| *to = lanes[input]);
                }
            }
        }
    }
}

/// Lays out the inputs of `R` rows from `first` on, and the powers of two of their spans.
#[inline(always)]
fn lay_out_spans<S: Simd, const R: usize>(
    s: S,
    rows: &[InputRow<'_>; R],
    first: usize,
    to: &mut [f32],
    powers: &mut [f32],
) {
    for (index, (to, powers)) in to.chunks_mut(SPAN_STEPS * R).zip(powers.chunks_exact_mut(R)).enumerate() {
        let from = first + index * SPAN;
        for (r, (row, power)) in rows.iter().zip(powers).enumerate() {
            let mut x = [s.splat(0.0); SPAN / LANES];
            for (block, x) in x.iter_mut().enumerate() {
                *x = row.load(s, from + block * LANES);
            }
            let (pairs, of_span) = span(s, &x);
            *power = of_span;
            for (to, &pair) in to.chunks_exact_mut(R).zip(&pairs) {
                to[r] = f32::from_bits(pair);
            }
        }
    }
}
