//! Packing of activations before a matrix product.

use super::{CHUNK, GroupedProduct, Work};
use crate::cpu::gemm::tile::for_tile;
use crate::cpu::simd::{Op, Simd};

/// A task that packs chunks `chunks.0..chunks.1` of one tile's activations.
pub(super) struct PackTile<'a, K> {
    pub(super) work: Work<'a, K>,
    pub(super) tile: usize,
    pub(super) chunks: (usize, usize),
}

impl<K: GroupedProduct> Op for PackTile<'_, K> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (_, rows) = self.work.tiling.tile(self.tile);
        for_tile!(S, rows, {
            if const { R <= K::MOST_ROWS } {
                self.pack::<S, R, P>(s);
            } else {
                unreachable!("a tile of {R} rows");
            }
        });
    }
}

impl<K: GroupedProduct> PackTile<'_, K> {
    /// Packs a tile of `R` rows. `_P` is the number of panels that [`for_tile`] assigns to `R`.
    #[inline(always)]
    fn pack<S: Simd, const R: usize, const _P: usize>(&self, s: S) {
        let Work { x, tiling, activations, kernel, .. } = self.work;
        let inputs = kernel.shape().inputs;
        let words = |inputs: usize| kernel.row_words(inputs, S::DOT_INPUTS);
        let (first, _) = tiling.tile(self.tile);
        let rows = x.rows::<S, R>(s, first, inputs);
        for chunk in self.chunks.0..self.chunks.1 {
            let from = words(chunk * CHUNK);
            let end = words(inputs.min((chunk + 1) * CHUNK));
            // SAFETY: the words of each chunk of each tile belong to one task.
            let to = unsafe { activations.slice_mut(first * words(inputs) + R * from, R * (end - from)) };
            kernel.pack(s, &rows, chunk * CHUNK, to);
        }
    }
}
