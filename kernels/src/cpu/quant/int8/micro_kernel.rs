//! The micro-kernel of matrix products in int8: the loop over groups, steps, rows and panels.

use std::hint::black_box;

use super::format::{GROUP, PAD, SCALES, group_bytes};
use crate::cpu::simd::{LANES, Simd};

/// A tile of at most this many rows ignores `further` in [`add_product`]. It prefetches only the weights that it
/// multiplies next, because it waits for them.
const FEW_ROWS: usize = 4;

/// Adds the matrix product of a tile's rows and the panels to `sums`, group by group. `sums[r][p]` holds sixteen lanes,
/// the sums of row `r` and the sixteen outputs of panel `p`.
///
/// # Safety
///
/// `x` is readable for the words of `R` rows of `inputs` activations, and each of `panels` for the groups that hold
/// these inputs. `panel_bytes` is the size in bytes of a panel. `further` holds, for each panel, the distance in bytes
/// to the panel to prefetch. If the distance is 0, the weights that this tile multiplies next are prefetched instead.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // The compiler does not unroll iterators over several arrays at once.
pub(super) unsafe fn add_product<S: Simd, const R: usize, const P: usize>(
    s: S,
    sums: &mut [[S::F; P]; R],
    x: *const u32,
    panels: [*const u8; P],
    inputs: usize,
    panel_bytes: usize,
    further: [usize; P],
) {
    let step_bytes = S::DOT_INPUTS * LANES;
    // Registers hold the integer sums of one group. The f32 sums over all groups stay in memory: `black_box` keeps the
    // compiler from moving the f32 sums to registers and spilling the integer sums.
    let rest = black_box(sums.as_mut_ptr().cast::<S::F>());
    let (mut x, mut at) = (x, 0);
    let mut left = inputs;
    while left > 0 {
        let inputs = left.min(GROUP).next_multiple_of(PAD);
        // SAFETY: by the caller's contract, this group's words and weights are readable.
        unsafe {
            let (scales, begins, steps) = (x, x.add(R), x.add(2 * R));
            let mut dots = [[s.splat_i(0); P]; R];
            for (r, dots) in dots.iter_mut().enumerate() {
                *dots = [s.splat_i((*begins.add(r)).cast_signed()); P];
            }
            // The next group is prefetched. After the last group, this is the first group of the next `P` panels.
            let next = if left > GROUP { at + group_bytes(GROUP) } else { P * panel_bytes };
            let mut fetched = [panels[0]; P];
            for p in 0..P {
                let shared = const { R > FEW_ROWS } && further[p] > 0;
                fetched[p] = panels[p].wrapping_add(if shared { further[p] + at } else { next });
            }
            // Tiles of at most eight rows wait for weights from main memory. Larger tiles find the group in the
            // second-level cache.
            let ask =
                |line: *const u8| if const { R <= 8 } { s.prefetch_far(line) } else { s.prefetch(line) };
            for line in fetched {
                ask(line);
            }
            // `PAD` inputs of a panel are one cache line.
            for line in 0..inputs / PAD {
                for fetched in fetched {
                    ask(fetched.wrapping_add(SCALES + line * PAD * LANES));
                }
                for step in line * (PAD / S::DOT_INPUTS)..(line + 1) * (PAD / S::DOT_INPUTS) {
                    let offset = at + SCALES + step * step_bytes;
                    // The loop over panels is the inner one, so that each word is loaded once and used for all panels.
                    for r in 0..R {
                        let word = *steps.add(step * R + r);
                        for p in 0..P {
                            dots[r][p] = s.dot_u8(dots[r][p], panels[p].add(offset), word);
                        }
                    }
                }
            }
            let mut of_panels = [s.splat(0.0); P];
            for p in 0..P {
                of_panels[p] = s.load(panels[p].add(at).cast());
            }
            for r in 0..R {
                let of_row = s.splat(f32::from_bits(*scales.add(r)));
                for p in 0..P {
                    let sum = rest.add(r * P + p);
                    *sum = s.fma_on_all_paths(s.floats(dots[r][p]), s.mul(of_panels[p], of_row), *sum);
                }
            }
            x = steps.add(inputs / S::DOT_INPUTS * R);
        }
        at += group_bytes(GROUP);
        left = left.saturating_sub(GROUP);
    }
}
