//! Packing of activations before a matrix product: quantisation, and layout in tiles of rows.
//!
//! A group of a tile holds the scales of the rows, then the initial values of the rows' integer sums (see [`OFFSET`]),
//! and then the steps. Each step holds one word of each row.

use super::format::{GROUP, OFFSET, PAD};
use super::quantise::{Quantised, quantise_lanes};
use crate::cpu::gemm::input::InputRow;
use crate::cpu::simd::{LANES, Simd};

/// Number of words per packed row.
pub(in crate::cpu::quant) const fn row_words(inputs: usize, dot_inputs: usize) -> usize {
    2 * inputs.div_ceil(GROUP) + inputs.next_multiple_of(PAD) / dot_inputs
}

/// Packs a group: the scales of the rows, the initial values of the rows' integer sums, and the words of all rows, step
/// by step.
#[inline(always)]
pub(super) fn pack_group<S: Simd, const R: usize>(
    s: S,
    rows: &[InputRow<'_>; R],
    first: usize,
    to: &mut [u32],
) {
    let (scales, rest) = to.split_at_mut(R);
    let (begins, steps) = rest.split_at_mut(R);
    // The words of the rows, in blocks of sixteen words per row. There are four blocks if a word holds two inputs. If a
    // word holds four inputs, only the first two blocks are used.
    let mut words = [[s.splat_i(0); R]; GROUP / (2 * LANES)];
    for (r, row) in rows.iter().enumerate() {
        let mut x = [s.splat(0.0); GROUP / LANES];
        for (block, x) in x.iter_mut().enumerate() {
            row.prefetch(s, first + GROUP + block * LANES);
            *x = row.load(s, first + block * LANES);
        }
        let Quantised { scale, sum, words: of_row } = quantise_lanes(s, x);
        scales[r] = scale.to_bits();
        begins[r] = (-i32::from(OFFSET) * sum).cast_unsigned();
        for (words, of_row) in words.iter_mut().zip(of_row) {
            words[r] = of_row;
        }
    }
    for (words, to) in words.iter().zip(steps.chunks_mut(LANES * R)) {
        if to.len() == LANES * R {
            // SAFETY: `to` has room for sixteen words of each row.
            unsafe { s.store_transposed(words, to.as_mut_ptr()) };
        } else {
            let mut whole = [[0u32; R]; LANES];
            // SAFETY: `whole` has room for sixteen words of each row.
            unsafe { s.store_transposed(words, whole.as_mut_ptr().cast()) };
            to.iter_mut().zip(whole.as_flattened()).for_each(|(to, word)| *to = *word);
        }
    }
}
