//! Products of integers of four bits with activations in eight bits, exact within a group.
//!
//! A chunk of a tile's packed activations holds the scales of the rows by group, then the initial values of the rows'
//! integer sums by group, and then the steps. A step is four inputs and holds one word of each row. The initial value
//! compensates for the zero point 8: it is -8 times the sum of the group's activations.

use std::hint::black_box;

use super::layout::{BLOCK, GroupedMatrix, LINE};
use crate::cpu::gemm::input::InputRow;
use crate::cpu::memory::fused_matrices::Shape;
use crate::cpu::quant::int8::quantise::{Rounded, round_lanes};
use crate::cpu::quant::product::{CHUNK, GroupedProduct};
use crate::cpu::simd::{LANES, Simd};
use crate::device::OffsetKind;

/// Number of inputs per step: the bytes of a word.
const STEP_INPUTS: usize = 4;
/// Number of lines per block. A line holds two steps.
const BLOCK_LINES: usize = BLOCK / (2 * STEP_INPUTS);
/// The zero point that the initial values of integer sums compensate for.
const ZERO: i32 = 8;
/// A tile of at most this many rows prefetches only the weights that it multiplies next, because it waits for them.
const FEW_ROWS: usize = 4;

/// Number of words of `inputs` packed activations of a row, with `groups` groups per chunk.
const fn words(inputs: usize, groups: usize) -> usize {
    inputs.div_ceil(CHUNK) * (2 * groups + CHUNK / STEP_INPUTS)
}

/// The most words that `inputs` packed activations of a row take.
pub(in crate::cpu::quant) const fn most_words(inputs: usize) -> usize {
    words(inputs, CHUNK / BLOCK)
}

/// Products with activations in eight bits.
#[derive(Clone, Copy)]
pub(super) struct DotProduct<'a>(pub(super) &'a GroupedMatrix);

impl GroupedProduct for DotProduct<'_> {
    /// With more rows, the sums of a tile, the halves of its weights and their mask do not fit 32 registers.
    const MOST_ROWS: usize = 12;

    #[inline(always)]
    fn shape(self) -> Shape {
        self.0.shape
    }
    #[inline(always)]
    fn data(&self) -> &[u8] {
        &self.0.data
    }
    #[inline(always)]
    fn panel_bytes(self, inputs: usize) -> usize {
        self.0.layout.panel_bytes(inputs)
    }
    #[inline(always)]
    fn row_words(self, inputs: usize, _: usize) -> usize {
        words(inputs, self.0.layout.groups())
    }

    #[inline(always)]
    fn pack<S: Simd, const R: usize>(self, s: S, rows: &[InputRow<'_>; R], first: usize, to: &mut [u32]) {
        let groups = self.0.layout.groups();
        let (scales, rest) = to.split_at_mut(groups * R);
        let (begins, steps) = rest.split_at_mut(groups * R);
        let mut words = [[s.splat_i(0); R]; 2];
        for (r, row) in rows.iter().enumerate() {
            let mut x = [s.splat(0.0); CHUNK / LANES];
            for (block, x) in x.iter_mut().enumerate() {
                row.prefetch(s, first + CHUNK + block * LANES);
                *x = row.load(s, first + block * LANES);
            }
            let store = |group: usize, scale: f32, sum: i32| {
                scales[group * R + r] = scale.to_bits();
                begins[group * R + r] = (-ZERO * sum).cast_unsigned();
            };
            match groups {
                1 => round_groups::<S, 8>(s, &mut x, store),
                2 => round_groups::<S, 4>(s, &mut x, store),
                _ => round_groups::<S, 2>(s, &mut x, store),
            }
            for (words, x) in words.iter_mut().zip(x.as_chunks::<4>().0) {
                words[r] = s.quads_i8(*x);
            }
        }
        for (words, to) in words.iter().zip(steps.chunks_exact_mut(LANES * R)) {
            // SAFETY: `to` has room for sixteen words of each row.
            unsafe { s.store_transposed(words, to.as_mut_ptr()) };
        }
    }

    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // The compiler does not unroll iterators over several arrays at once.
    unsafe fn add_product<S: Simd, const R: usize, const P: usize>(
        self,
        s: S,
        sums: &mut [[S::F; P]; R],
        x: *const u32,
        panels: [*const u8; P],
        inputs: usize,
        further: [usize; P],
    ) {
        let layout = self.0.layout;
        let (groups, group_blocks) = (layout.groups(), layout.group / BLOCK);
        let (header, chunk_bytes) = (layout.header(), layout.chunk_bytes());
        let others = (P - 1) * layout.panel_bytes(self.0.shape.inputs);
        // Registers hold the integer sums of one group. The f32 sums over all groups stay in memory: `black_box` keeps
        // the compiler from moving the f32 sums to registers and spilling the integer sums.
        let rest = black_box(sums.as_mut_ptr().cast::<S::F>());
        let (mut x, mut at, mut left) = (x, 0, inputs);
        while left > 0 {
            let blocks = left.min(CHUNK).div_ceil(BLOCK);
            // The chunk after the next is prefetched. Behind the last chunk, this is a chunk of the next `P` panels.
            let ahead = 2 * chunk_bytes + if left > 2 * CHUNK { 0 } else { others };
            let mut fetched = [panels[0]; P];
            for p in 0..P {
                let shared = const { R > FEW_ROWS } && further[p] > 0;
                fetched[p] = panels[p].wrapping_add(at + if shared { further[p] } else { ahead });
            }
            // Tiles of at most eight rows wait for weights from main memory. Larger tiles find the chunk in the
            // second-level cache.
            let ask =
                |line: *const u8| if const { R <= 8 } { s.prefetch_far(line) } else { s.prefetch(line) };
            for line in (0..header).step_by(LINE) {
                fetched.iter().for_each(|fetched| ask(fetched.wrapping_add(line)));
            }
            // SAFETY: by the caller's contract, this chunk's words and lines are readable.
            unsafe {
                let (scales, begins, steps) = (x, x.add(groups * R), x.add(2 * groups * R));
                let (mut block, mut group) = (0, 0);
                while block < blocks {
                    let end = blocks.min(block + group_blocks);
                    let (scales, begins) = (scales.add(group * R), begins.add(group * R));
                    let mut dots = [[s.splat_i(0); P]; R];
                    if layout.offsets == OffsetKind::None {
                        for r in 0..R {
                            dots[r] = [s.splat_i((*begins.add(r)).cast_signed()); P];
                        }
                    }
                    while block < end {
                        let mut part = dots;
                        part.as_flattened_mut().iter_mut().for_each(|part| *part = s.begin_quads(*part));
                        for line in 0..BLOCK_LINES {
                            let offset = header + (block * BLOCK_LINES + line) * LINE;
                            let mut weights = [[s.splat_i(0); 2]; P];
                            for p in 0..P {
                                ask(fetched[p].wrapping_add(offset));
                                weights[p] = s.load_nibbles(panels[p].add(at + offset));
                            }
                            for half in 0..2 {
                                let step = 2 * (block * BLOCK_LINES + line) + half;
                                // The loop over panels is the inner one, so that each word is loaded once and used for
                                // all panels.
                                for r in 0..R {
                                    let word = *steps.add(step * R + r);
                                    for p in 0..P {
                                        part[r][p] = s.dot_quads(part[r][p], weights[p][half], word);
                                    }
                                }
                            }
                        }
                        for r in 0..R {
                            for p in 0..P {
                                dots[r][p] = s.end_quads(dots[r][p], part[r][p]);
                            }
                        }
                        block += 1;
                    }
                    let mut of_panels = [s.splat(0.0); P];
                    for p in 0..P {
                        of_panels[p] = layout.load_scales(s, panels[p].add(at), group);
                    }
                    for p in 0..P {
                        // The integer sums of a group with zero points or minima begin with 0.
                        let zero = (layout.offsets == OffsetKind::ZeroPoints).then(|| {
                            let zero = s.load_u8(panels[p].add(at + layout.zeros_at(group)));
                            s.mul(zero, s.splat(1.0 / ZERO as f32))
                        });
                        for r in 0..R {
                            let mut dot = s.floats(dots[r][p]);
                            if let Some(zero) = zero {
                                // Exact: the terms and their sum are integers below 2^24.
                                dot = s.fma(zero, s.splat((*begins.add(r)).cast_signed() as f32), dot);
                            }
                            let of_row = s.splat(f32::from_bits(*scales.add(r)));
                            let sum = rest.add(r * P + p);
                            *sum = s.fma_on_all_paths(dot, s.mul(of_panels[p], of_row), *sum);
                        }
                    }
                    // A loop of its own, so that the loop above stays as short as it is without minima.
                    if layout.offsets == OffsetKind::Minima {
                        for p in 0..P {
                            let minima = layout.load_minima(s, panels[p].add(at), group);
                            let minima = s.mul(minima, s.splat(1.0 / ZERO as f32));
                            for r in 0..R {
                                // Less the minimum times the sum of the group's activations.
                                let of_row = s.splat(f32::from_bits(*scales.add(r)));
                                let begin = s.splat((*begins.add(r)).cast_signed() as f32);
                                let sum = rest.add(r * P + p);
                                *sum = s.fma_on_all_paths(begin, s.mul(minima, of_row), *sum);
                            }
                        }
                    }
                    group += 1;
                }
                x = steps.add(CHUNK / STEP_INPUTS * R);
            }
            at += chunk_bytes;
            left = left.saturating_sub(CHUNK);
        }
    }
}

/// Rounds the groups of a chunk of activations, which have `N` vectors each, to integers. Calls `store` with the index,
/// the scale and the sum of each group.
#[inline(always)]
fn round_groups<S: Simd, const N: usize>(
    s: S,
    x: &mut [S::F; CHUNK / LANES],
    mut store: impl FnMut(usize, f32, i32),
) {
    for (group, x) in x.as_chunks_mut::<N>().0.iter_mut().enumerate() {
        let Rounded { scale, numbers } = round_lanes(s, *x);
        let mut sum = s.splat(0.0);
        for number in numbers {
            // The sum is exact: all partial sums are integers far below 2^24.
            sum = s.add(sum, number);
        }
        store(group, scale, s.sum(sum) as i32);
        *x = numbers;
    }
}
