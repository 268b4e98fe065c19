//! Products of quantised weights with activations in f32: codes are widened to f32 in registers.
//!
//! A chunk of a tile's packed activations holds the f32 of all rows for each of [`CHUNK`] inputs. Zeros pad the last
//! chunk. If groups have minima, the sums of the rows by group come first: what a minimum subtracts from an output is
//! the minimum times the sum of the group's activations.

use std::hint::black_box;
use std::marker::PhantomData;

use super::layout::{BLOCK, E2M1, GroupedMatrix, LINE};
use crate::cpu::gemm::input::InputRow;
use crate::cpu::memory::fused_matrices::Shape;
use crate::cpu::quant::product::{CHUNK, GroupedProduct};
use crate::cpu::simd::{LANES, Simd};
use crate::device::{OffsetKind, QuantizedType};

/// The smallest group.
const LEAST_GROUP: usize = 16;

/// Number of words of `inputs` packed activations of a row, with `sums` sums of groups per chunk.
const fn words(inputs: usize, sums: usize) -> usize {
    inputs.div_ceil(CHUNK) * (sums + CHUNK)
}

/// The most words that `inputs` packed activations of a row take.
pub(in crate::cpu::quant) const fn most_words(inputs: usize) -> usize {
    words(inputs, CHUNK / LEAST_GROUP)
}

/// A kind of codes that are widened.
pub(super) trait Widen: Copy + Send + Sync {
    /// The inputs of a line's four bytes per output, in the order in which they are widened. The lowest bits of the
    /// bytes come first.
    const ORDER: &'static [usize];
    /// Bits per code.
    const BITS: u32;
    /// True if codes can have zero points.
    const HAS_ZEROS: bool;

    /// Widens the code in the lowest bits of each word. `table` holds the numbers of codes of four bits.
    fn widen<S: Simd>(s: S, words: S::I, table: S::F) -> S::F;
}

/// Codes of four bits: integers and e2m1.
#[derive(Clone, Copy)]
pub(super) struct Nibbles;

impl Widen for Nibbles {
    const ORDER: &'static [usize] = &[0, 4, 1, 5, 2, 6, 3, 7];
    const BITS: u32 = 4;
    const HAS_ZEROS: bool = true;

    #[inline(always)]
    fn widen<S: Simd>(s: S, words: S::I, table: S::F) -> S::F {
        s.look_up(table, words)
    }
}

/// Integers of eight bits.
#[derive(Clone, Copy)]
pub(super) struct Integers;

impl Widen for Integers {
    const ORDER: &'static [usize] = &[0, 1, 2, 3];
    const BITS: u32 = 8;
    const HAS_ZEROS: bool = true;

    #[inline(always)]
    fn widen<S: Simd>(s: S, words: S::I, _: S::F) -> S::F {
        s.widen_i8(words)
    }
}

/// Floats of eight bits.
#[derive(Clone, Copy)]
pub(super) struct Floats;

impl Widen for Floats {
    const ORDER: &'static [usize] = &[0, 1, 2, 3];
    const BITS: u32 = 8;
    const HAS_ZEROS: bool = false;

    #[inline(always)]
    fn widen<S: Simd>(s: S, words: S::I, _: S::F) -> S::F {
        s.widen_e4m3(words)
    }
}

/// Products with activations in f32.
#[derive(Clone, Copy)]
pub(super) struct WidenedProduct<'a, W> {
    matrix: &'a GroupedMatrix,
    widen: PhantomData<W>,
}

impl<'a, W> WidenedProduct<'a, W> {
    pub(super) fn new(matrix: &'a GroupedMatrix) -> Self {
        Self { matrix, widen: PhantomData }
    }

    /// Number of sums of activations per chunk and row.
    #[inline(always)]
    fn sums(self) -> usize {
        match self.matrix.layout.offsets {
            OffsetKind::Minima => self.matrix.layout.groups(),
            OffsetKind::None | OffsetKind::ZeroPoints => 0,
        }
    }
}

impl<W: Widen> GroupedProduct for WidenedProduct<'_, W> {
    const MOST_ROWS: usize = 6;

    #[inline(always)]
    fn shape(self) -> Shape {
        self.matrix.shape
    }
    #[inline(always)]
    fn data(&self) -> &[u8] {
        &self.matrix.data
    }
    #[inline(always)]
    fn panel_bytes(self, inputs: usize) -> usize {
        self.matrix.layout.panel_bytes(inputs)
    }
    #[inline(always)]
    fn row_words(self, inputs: usize, _: usize) -> usize {
        words(inputs, self.sums())
    }

    #[inline(always)]
    fn pack<S: Simd, const R: usize>(self, s: S, rows: &[InputRow<'_>; R], first: usize, to: &mut [u32]) {
        let count = self.sums();
        let (sums, inputs) = to.split_at_mut(count * R);
        sums.fill(0);
        for (block, to) in inputs.chunks_exact_mut(LANES * R).enumerate() {
            let mut lanes = [[0.0f32; LANES]; R];
            for (r, (row, lanes)) in rows.iter().zip(&mut lanes).enumerate() {
                s.store_some(lanes, row.load(s, first + block * LANES));
                if count > 0 {
                    let sum = &mut sums[block * LANES / self.matrix.layout.group * R + r];
                    *sum = (f32::from_bits(*sum) + lanes.iter().sum::<f32>()).to_bits();
                }
            }
            for (input, to) in to.chunks_exact_mut(R).enumerate() {
                to.iter_mut().zip(&lanes).for_each(|(to, lanes)| *to = lanes[input].to_bits());
            }
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
        _: [usize; P],
    ) {
        let layout = self.matrix.layout;
        let line_inputs = const { W::ORDER.len() };
        let (header, chunk_bytes, group_lines) =
            (layout.header(), layout.chunk_bytes(), layout.group / line_inputs);
        let others = (P - 1) * layout.panel_bytes(self.matrix.shape.inputs);
        let integers: [f32; 16] = std::array::from_fn(|code| code as f32);
        let (table, no_zero) = match layout.codes {
            QuantizedType::E2m1 => (s.load_some(&E2M1, 0.0), 0.0),
            QuantizedType::Int4 if layout.offsets == OffsetKind::None => (s.load_some(&integers, 0.0), 8.0),
            QuantizedType::Int4 => (s.load_some(&integers, 0.0), 0.0),
            QuantizedType::Int8 | QuantizedType::E4m3 => (s.splat(0.0), 0.0),
        };
        let rest = black_box(sums.as_mut_ptr().cast::<S::F>());
        let count = self.sums();
        let (mut x, mut at, mut left) = (x.cast::<f32>(), 0, inputs);
        while left > 0 {
            let (sums_of_groups, of_inputs) = (x, x.wrapping_add(count * R));
            let lines = left.min(CHUNK).div_ceil(BLOCK) * (BLOCK / line_inputs);
            // The next chunk is prefetched. Behind the last chunk, this is a chunk of the next `P` panels.
            let ahead = at + chunk_bytes + if left > CHUNK { 0 } else { others };
            let ask = |offset: usize| {
                panels.iter().for_each(|panel| s.prefetch_far(panel.wrapping_add(ahead + offset)));
            };
            (0..header).step_by(LINE).for_each(ask);
            // SAFETY: by the caller's contract, this chunk's activations and lines are readable.
            unsafe {
                let (mut line, mut group) = (0, 0);
                while line < lines {
                    let end = lines.min(line + group_lines);
                    let mut zeros = [s.splat(no_zero); P];
                    if layout.offsets == OffsetKind::ZeroPoints {
                        for p in 0..P {
                            let from = panels[p].add(at + layout.zeros_at(group));
                            zeros[p] = match layout.codes {
                                QuantizedType::Int8 => s.load_i8(from),
                                _ => s.load_u8(from),
                            };
                        }
                    }
                    let mut parts = [[s.splat(0.0); P]; R];
                    while line < end {
                        ask(header + line * LINE);
                        let mut words = [s.splat_i(0); P];
                        for p in 0..P {
                            words[p] = s.load_i(panels[p].add(at + header + line * LINE).cast());
                        }
                        let of_line = of_inputs.add(line * line_inputs * R);
                        for &input in W::ORDER {
                            let mut weights = [s.splat(0.0); P];
                            for p in 0..P {
                                weights[p] = W::widen(s, words[p], table);
                                if const { W::HAS_ZEROS } {
                                    // Exact: both are integers, or the zero point is 0.
                                    weights[p] = s.sub(weights[p], zeros[p]);
                                }
                                words[p] = s.shift_right(words[p], W::BITS);
                            }
                            for r in 0..R {
                                let x = s.splat(*of_line.add(input * R + r));
                                for p in 0..P {
                                    parts[r][p] = s.fma(x, weights[p], parts[r][p]);
                                }
                            }
                        }
                        line += 1;
                    }
                    for p in 0..P {
                        let scales = layout.load_scales(s, panels[p].add(at), group);
                        for r in 0..R {
                            let sum = rest.add(r * P + p);
                            *sum = s.fma(parts[r][p], scales, *sum);
                        }
                        if count > 0 {
                            let minima = layout.load_minima(s, panels[p].add(at), group);
                            for r in 0..R {
                                let of_group = s.splat(-*sums_of_groups.add(group * R + r));
                                let sum = rest.add(r * P + p);
                                *sum = s.fma(minima, of_group, *sum);
                            }
                        }
                    }
                    group += 1;
                }
                x = of_inputs.add(CHUNK * R);
            }
            at += chunk_bytes;
            left = left.saturating_sub(CHUNK);
        }
    }
}
