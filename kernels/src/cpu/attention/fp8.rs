//! Pages in fp8, whose elements are converted for the kernels over bfloat16 and f16.
//!
//! The conversion is exact: bfloat16 has every number of fp8, and f16 has every such number divided by 256, a
//! power of two. f16 takes the fewest instructions. A block is converted once for all queries of a task. The scale of
//! keys is a factor of the queries, and the scale of values is a factor of the result, so the elements are not
//! multiplied.

use super::kernel::{Block, MOST_PANELS, prefetch};
use crate::cpu::memory::Element;
use crate::cpu::memory::format::{FromFp8, STEP};
use crate::cpu::simd::{Op, Simd};

/// The pages of a plane, for a kernel over elements of type `T`.
#[derive(Clone, Copy)]
pub(super) enum Pages<'a, T> {
    /// Pages of elements that the kernel reads as they are.
    Full(&'a [T]),
    /// Pages in fp8, which are converted.
    Fp8(&'a [u8]),
}

/// Number of converted elements that a task needs for the keys and values of a block of `block` keys.
pub(super) fn widened_len(block: usize, head_dim: usize) -> usize {
    2 * block * head_dim
}

/// Converts the panels `panels.0 .. panels.1` of a block's keys or values, and prefetches the panels that
/// follow. Keys are converted before their scores and values before their sums, so that the next block is read in two
/// parts, each beside arithmetic.
pub(super) struct WidenPanels<'t> {
    /// The panels of keys, or the panels of values of the same tokens.
    pub(super) from: &'t [*const u8; MOST_PANELS],
    /// The panels to prefetch.
    pub(super) next: &'t [*const u8; MOST_PANELS],
    pub(super) panels: (usize, usize),
    /// Number of elements per panel.
    pub(super) panel: usize,
    pub(super) form: FromFp8,
    /// Receives [`MOST_PANELS`] panels or fewer: a half of [`widened_len`].
    pub(super) to: &'t mut [u16],
}

impl Op for WidenPanels<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { from, next, panels, panel, form, to } = self;
        assert!(panels.1 <= MOST_PANELS && panel.is_multiple_of(STEP));
        for p in panels.0..panels.1 {
            let (from, next) = (from[p], next[p]);
            for (step, to) in to[p * panel..(p + 1) * panel].chunks_exact_mut(STEP).enumerate() {
                prefetch(s, next.wrapping_add(step * STEP));
                // SAFETY: `Panels::of_head` has checked that the panels of the block are in bounds. `to` has room for a
                // step.
                unsafe {
                    match form {
                        FromFp8::Bf16 => s.e4m3_to_bf16(from.add(step * STEP), to.as_mut_ptr()),
                        FromFp8::F16 => s.e4m3_pairs_to_f16(from.add(step * STEP), to.as_mut_ptr()),
                    }
                };
            }
        }
    }
}

/// Returns the addresses of a block that [`WidenPanels`] writes to the halves of `widened`: keys, and then values.
/// There is nothing left to prefetch. `T` is the type of converted elements.
pub(super) fn block_of<T: Element>(widened: &[u16], panel: usize) -> Block<T> {
    let (keys, values) = widened.split_at(widened.len() / 2);
    let panels = |of: &[u16]| {
        let last = (of.len() / panel).max(1) - 1;
        std::array::from_fn(|p: usize| of.as_ptr().wrapping_add(p.min(last) * panel).cast::<T>())
    };
    let (keys, values) = (panels(keys), panels(values));
    Block { keys, values, next_keys: keys, next_values: values }
}
