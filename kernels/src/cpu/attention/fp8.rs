//! Pages in fp8, whose elements are converted to bfloat16 for the kernels over bfloat16.
//!
//! The conversion is exact, because bfloat16 has every number of fp8. A block is converted once for all queries of a
//! task. The scale of keys is a factor of the queries, and the scale of values is a factor of the result, so the
//! elements are not multiplied.

use super::kernel::{Block, MOST_PANELS, prefetch};
use crate::cpu::memory::Element;
use crate::cpu::memory::format::STEP;
use crate::cpu::simd::{Op, Simd};

/// The pages of a plane, for a kernel over elements of type `T`.
#[derive(Clone, Copy)]
pub(super) enum Pages<'a, T> {
    /// Pages of elements that the kernel reads as they are.
    Full(&'a [T]),
    /// Pages in fp8. The kernel reads bfloat16.
    Fp8(&'a [u8]),
}

/// Number of bfloat16 that a task needs for the keys and values of a block of `block` keys.
pub(super) fn widened_len(block: usize, head_dim: usize) -> usize {
    2 * block * head_dim
}

/// Converts the panels `panels.0 .. panels.1` of a block to bfloat16, and prefetches the panels that follow.
pub(super) struct WidenBlock<'t> {
    pub(super) from: &'t Block<u8>,
    pub(super) panels: (usize, usize),
    /// Number of elements per panel of keys, and of the panels of values of the same tokens.
    pub(super) panel: usize,
    /// Receives the keys and then the values of [`MOST_PANELS`] panels or fewer: see [`widened_len`].
    pub(super) to: &'t mut [u16],
}

impl Op for WidenBlock<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { from, panels, panel, to } = self;
        assert!(panels.1 <= MOST_PANELS && panel.is_multiple_of(STEP));
        let (keys, values) = to.split_at_mut(to.len() / 2);
        for (from, next, to) in
            [(&from.keys, &from.next_keys, keys), (&from.values, &from.next_values, values)]
        {
            for p in panels.0..panels.1 {
                let (from, next) = (from[p], next[p]);
                for (step, to) in to[p * panel..(p + 1) * panel].chunks_exact_mut(STEP).enumerate() {
                    prefetch(s, next.wrapping_add(step * STEP));
                    // SAFETY: `Panels::of_head` has checked that the panels of the block are in bounds. `to` has room
                    // for a step.
                    unsafe { s.e4m3_to_bf16(from.add(step * STEP), to.as_mut_ptr()) };
                }
            }
        }
    }
}

/// Returns the addresses of a block that [`WidenBlock`] has written to `widened`. There is nothing left to prefetch.
/// `T` is the type of bfloat16.
pub(super) fn block_of<T: Element>(widened: &[u16], panel: usize) -> Block<T> {
    let (keys, values) = widened.split_at(widened.len() / 2);
    let panels = |of: &[u16]| {
        let last = (of.len() / panel).max(1) - 1;
        std::array::from_fn(|p: usize| of.as_ptr().wrapping_add(p.min(last) * panel).cast::<T>())
    };
    let (keys, values) = (panels(keys), panels(values));
    Block { keys, values, next_keys: keys, next_values: values }
}
