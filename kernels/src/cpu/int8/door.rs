//! The way of activations into a product: quantised, and laid out tile by tile.

use super::super::simd::{LANES, Op, Simd};
use super::product::Work;
use super::quantise::quantise;
use super::{GROUP, OFFSET, PAD};

/// Words of a row at the door.
pub(super) const fn door_words(inputs: usize, dot_inputs: usize) -> usize {
    2 * inputs.div_ceil(GROUP) + inputs.next_multiple_of(PAD) / dot_inputs
}

/// A tile's way through the door.
pub(super) struct Pass<'a> {
    pub(super) work: Work<'a>,
    pub(super) tile: usize,
}

impl Op for Pass<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Work { x, tiling, door, matrix, .. } = self.work;
        let (inputs, words) = (matrix.shape.inputs, door_words(matrix.shape.inputs, S::DOT_INPUTS));
        let (first, rows) = tiling.tile(self.tile);
        // SAFETY: each tile has a part of its own.
        let to = unsafe { door.part(first * words, rows * words) };
        let (mut group, mut quantised) = ([0.0; GROUP], [0; GROUP]);
        for row in 0..rows {
            let [x] = x.rows::<S, 1>(s, first + row, inputs);
            let groups = to.chunks_mut(rows * (2 + GROUP / S::DOT_INPUTS)).take(inputs.div_ceil(GROUP));
            for (index, to) in groups.enumerate() {
                let group = &mut group[..GROUP.min(inputs - index * GROUP)];
                for (block, to) in group.chunks_mut(LANES).enumerate() {
                    s.store_some(to, x.load(s, index * GROUP + block * LANES));
                }
                let scale = quantise(s, group, &mut quantised);
                let sum: i32 = quantised.iter().map(|&q| i32::from(q)).sum();
                let (scales, rest) = to.split_at_mut(rows);
                let (begins, steps) = rest.split_at_mut(rows);
                scales[row] = scale.to_bits();
                begins[row] = (-i32::from(OFFSET) * sum).cast_unsigned();
                for (to, x) in steps.chunks_exact_mut(rows).zip(quantised.chunks_exact(S::DOT_INPUTS)) {
                    to[row] = S::dot_word(x);
                }
            }
        }
    }
}
