//! The weighted sum of a block's values, computed with dot products over pairs of keys.

use super::super::kernel::{Kernel, Values, prefetch};
use super::{Dots, mask};
use crate::cpu::memory::format::STEP;
use crate::cpu::memory::kv::VALUE_PANEL;
use crate::cpu::simd::{LANES, Op, Simd};

/// Number of pairs of keys per panel.
const PANEL_PAIRS: usize = LANES / 2;

/// Adds the weighted values of the key pairs `pairs.0 .. pairs.1` to the sums of `R` queries, `P` times sixteen
/// elements at a time. All of these queries see both keys of each pair.
pub(super) struct AddShared<'t, 'v, const R: usize, const P: usize> {
    pub(super) values: &'t mut Values<'v, u16>,
    pub(super) pairs: (usize, usize),
    /// Factors by which the queries' sums are multiplied before values are added.
    pub(super) decay: &'t [f32; LANES],
}

impl<const R: usize, const P: usize> Op for AddShared<'_, '_, R, P> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let head_dim = self.values.head_dim;
        let mut column = 0;
        // One or two queries need eight independent sums of sixteen elements to hide the latency of a dot product.
        while const { R <= 2 } && column + 8 * LANES <= head_dim {
            self.columns::<S, 8>(s, column);
            column += 8 * LANES;
        }
        while column + P * LANES <= head_dim {
            self.columns::<S, P>(s, column);
            column += P * LANES;
        }
        while column < head_dim {
            self.columns::<S, 1>(s, column);
            column += LANES;
        }
    }
}

impl<const R: usize, const P: usize> AddShared<'_, '_, R, P> {
    #[inline(always)]
    fn columns<S: Simd, const N: usize>(&mut self, s: S, column: usize) {
        let Self { values: Values { block, head_dim, weights, sums: rest, .. }, pairs, decay } = self;
        let head_dim = *head_dim;
        assert!(pairs.0 <= pairs.1 && pairs.1 <= Dots::BLOCK / 2 && weights.len() == R * Dots::BLOCK);
        assert!(column + N * LANES <= head_dim && rest.len() == R * head_dim);
        let rest = rest[column..].as_mut_ptr();
        let mut sums = [[s.splat(0.0); N]; R];
        for (r, sums) in sums.iter_mut().enumerate() {
            let decay = s.splat(decay[r]);
            for (p, sum) in sums.iter_mut().enumerate() {
                // SAFETY: `rest` holds `R` rows of `head_dim` sums, by the assertion.
                *sum = s.mul(unsafe { s.load(rest.add(r * head_dim + p * LANES)) }, decay);
            }
        }
        let mut pair = pairs.0;
        while pair < pairs.1 {
            let end = pairs.1.min((pair / PANEL_PAIRS + 1) * PANEL_PAIRS);
            let at = column / LANES * VALUE_PANEL + pair % PANEL_PAIRS * STEP;
            let values = block.values[pair / PANEL_PAIRS].wrapping_add(at);
            let next = block.next_values[pair / PANEL_PAIRS].wrapping_add(at);
            for step in 0..end - pair {
                for p in 0..N {
                    prefetch(s, next.wrapping_add(p * VALUE_PANEL + step * STEP));
                }
                // SAFETY: `weights` holds `R` rows of `BLOCK` words, by the assertion.
                let weights = unsafe { weights.as_ptr().cast::<u32>().add(pair + step) };
                for (r, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: `weights` holds `R` rows of `BLOCK` words, by the assertion.
                    let weight = unsafe { *weights.add(r * Dots::BLOCK) };
                    for (p, sum) in sums.iter_mut().enumerate() {
                        // SAFETY: `Panels::of_head` has checked that the visible panels of the block are in bounds.
                        *sum = unsafe { s.dot_bf16(*sum, values.add(p * VALUE_PANEL + step * STEP), weight) };
                    }
                }
            }
            pair = end;
        }
        for (r, sums) in sums.iter().enumerate() {
            for (p, &sum) in sums.iter().enumerate() {
                // SAFETY: `rest` holds `R` rows of `head_dim` sums, by the assertion.
                unsafe { s.store(rest.add(r * head_dim + p * LANES), sum) };
            }
        }
    }
}

/// Adds the weighted values of the key pairs `pairs.0 .. pairs.1` to the queries' sums. Each query adds only the keys
/// that it sees.
pub(super) struct AddOwn<'t, 'v> {
    pub(super) values: &'t mut Values<'v, u16>,
    pub(super) pairs: (usize, usize),
    /// Factors by which the queries' sums are multiplied before values are added.
    pub(super) decay: &'t [f32; LANES],
}

impl Op for AddOwn<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let head_dim = self.values.head_dim;
        for query in 0..self.values.decay.len() {
            let mut column = 0;
            while column + 4 * LANES <= head_dim {
                self.columns::<S, 4>(s, query, column);
                column += 4 * LANES;
            }
            while column < head_dim {
                self.columns::<S, 1>(s, query, column);
                column += LANES;
            }
        }
    }
}

impl AddOwn<'_, '_> {
    #[inline(always)]
    fn columns<S: Simd, const N: usize>(&mut self, s: S, query: usize, column: usize) {
        let Self { values: Values { block, head_dim, weights, sums: rest, visible, .. }, pairs, decay } =
            self;
        let rest = &mut rest[query * *head_dim + column..][..N * LANES];
        let words = &weights[query * Dots::BLOCK..][..Dots::BLOCK / 2];
        let decay = s.splat(decay[query]);
        let mut sums = [s.splat(0.0); N];
        for (sum, rest) in sums.iter_mut().zip(rest.chunks_exact(LANES)) {
            *sum = s.mul(s.load_some(rest, 0.0), decay);
        }
        for (pair, word) in words.iter().enumerate().take(pairs.1).skip(pairs.0) {
            let mask = mask(visible[query], pair);
            if mask == 0 {
                continue;
            }
            let at = column / LANES * VALUE_PANEL + pair % PANEL_PAIRS * STEP;
            let values = block.values[pair / PANEL_PAIRS].wrapping_add(at);
            for (p, sum) in sums.iter_mut().enumerate() {
                // SAFETY: `Panels::of_head` has checked that the visible panels of the block are in bounds.
                *sum = unsafe { s.dot_bf16_masked(*sum, values.add(p * VALUE_PANEL), word.to_bits(), mask) };
            }
        }
        for (&sum, rest) in sums.iter().zip(rest.chunks_exact_mut(LANES)) {
            s.store_some(rest, sum);
        }
    }
}
