//! Micro-kernels: the innermost loops of matrix products, one per kind of weights. Each reads activations in its own
//! [`Layout`].

use std::marker::PhantomData;

use super::activations::{PackBfpBlocks, PackPairs, PackPlain, PackRows};
use crate::cpu::gemm::tile::{Rows, dot_product_on, product_on};
use crate::cpu::memory::Element;
use crate::cpu::memory::format::{Bf16, F16, F32, Format, STEP, Stored};
use crate::cpu::memory::matrix::Elements;
use crate::cpu::quant::block_float::{self, BFP_BLOCK};
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};

/// Layout of the packed activations of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) enum Layout {
    /// An f32 per input.
    Plain,
    /// A word per two inputs, which are bfloat16.
    Pairs,
    /// A word per two inputs, which are the integers of BFP blocks. The second half of the tile's memory holds the
    /// blocks' powers of two.
    BlockFloat,
}

impl Layout {
    /// The layout of the activations that a product with these weights multiplies.
    pub(in crate::cpu) fn of(elements: &Elements) -> Self {
        match elements {
            Elements::Stored(Stored::F32(_)) => Widened::<F32>::LAYOUT,
            Elements::Stored(Stored::F16(_)) => Widened::<F16>::LAYOUT,
            Elements::Stored(Stored::Bf16(_)) => Dots::LAYOUT,
            Elements::BlockFloat(_) => BlockFloat::LAYOUT,
        }
    }

    /// Rounds activations as packing in this layout rounds them, except that denormals are kept. The activations are
    /// one BFP block.
    #[inline(always)]
    pub(in crate::cpu) fn round<S: Simd>(
        self,
        s: S,
        x: [S::F; BFP_BLOCK / LANES],
    ) -> [S::F; BFP_BLOCK / LANES] {
        let mut rounded = x;
        match self {
            Self::Plain => {}
            Self::Pairs => {
                for x in &mut rounded {
                    *x = s.round_to_bf16(*x);
                }
            }
            Self::BlockFloat => rounded = block_float::round_activations(s, x),
        }
        rounded
    }

    /// Number of words per step of a row. A step is two inputs.
    pub(super) const fn step_words(self) -> usize {
        match self {
            Self::Plain => 2,
            Self::Pairs | Self::BlockFloat => 1,
        }
    }

    /// Number of words of a tile of `rows` rows.
    pub(super) const fn tile_words(self, rows: usize, steps: usize) -> usize {
        match self {
            Self::Plain | Self::BlockFloat => 2 * steps * rows,
            Self::Pairs => steps * rows,
        }
    }
}

/// A micro-kernel: the innermost loop of a matrix product for one kind of weights.
pub(super) trait MicroKernel: Copy + Send + Sync + 'static {
    /// The type of a panel's elements in memory.
    type Raw: Element;
    /// Packs the activations.
    type Packing: PackRows;
    const LAYOUT: Layout = <Self::Packing as PackRows>::LAYOUT;

    /// Returns the elements of a matrix; `None` if this micro-kernel multiplies elements of another kind.
    fn elements(elements: &Elements) -> Option<&[Self::Raw]>;

    /// Number of lines of [`STEP`] elements that `steps` steps take. If `steps` is the index of a block's first step,
    /// the result is the index of the block's first line.
    #[inline(always)]
    fn lines(steps: usize) -> usize {
        steps
    }

    /// Prefetches a cache line of the next block of weights (see [`super::blocked`]). The address may be invalid.
    #[inline(always)]
    fn prefetch_block<S: Simd>(s: S, line: *const u8) {
        s.prefetch(line);
    }

    /// Runs `op`, compiled with all instructions of `path` that the micro-kernel uses.
    fn run<O: Op>(path: Path, op: O) -> O::Output;

    /// Returns `sums` plus the matrix product of a tile's rows and the panels over `2 * steps` inputs. `sums[r][p]`
    /// holds sixteen lanes, the sums of row `r` and the sixteen outputs of panel `p`. Calls `ask(p, line)` for each
    /// line of each panel, to prefetch later lines.
    ///
    /// # Safety
    ///
    /// `x` points to a tile of `R` rows. The tile and the panels are readable for `steps` steps.
    unsafe fn multiply<S: Simd, const R: usize, const P: usize>(
        s: S,
        sums: [[S::F; P]; R],
        x: Inputs,
        panels: [*const Self::Raw; P],
        steps: usize,
        ask: impl Fn(usize, usize),
    ) -> [[S::F; P]; R];
}

/// Addresses of a tile's packed activations.
#[derive(Clone, Copy)]
pub(super) struct Inputs {
    pub(super) values: *const f32,
    /// The powers of two of BFP blocks. Micro-kernels with other layouts do not dereference this address.
    pub(super) powers: *const f32,
}

/// The elements of a matrix.
#[derive(Clone, Copy)]
pub(super) struct Data<'a, K: MicroKernel> {
    pub(super) elements: &'a [K::Raw],
    /// Number of steps per panel.
    pub(super) steps: usize,
}

impl<K: MicroKernel> Data<'_, K> {
    /// Address of step `first` of a panel. Panics if fewer than `count` steps follow from this address on.
    #[inline(always)]
    pub(super) fn steps(&self, panel: usize, first: usize, count: usize) -> *const K::Raw {
        let line = panel * K::lines(self.steps) + K::lines(first);
        self.elements[line * STEP..][..K::lines(count) * STEP].as_ptr()
    }

    /// Address of step `first` of a panel, for a prefetch. The address may be out of range.
    #[inline(always)]
    pub(super) fn address(&self, panel: usize, first: usize) -> *const u8 {
        let line = panel * K::lines(self.steps) + K::lines(first);
        self.elements.as_ptr().wrapping_add(line * STEP).cast()
    }
}

/// Arithmetic in f32. The weights, of format f32 or f16, are converted to f32 as they are loaded.
#[derive(Clone, Copy)]
pub(super) struct Widened<W: Format>(PhantomData<W>);

impl<W: Format> MicroKernel for Widened<W> {
    type Raw = W::Raw;
    type Packing = PackPlain;

    fn elements(elements: &Elements) -> Option<&[W::Raw]> {
        let Elements::Stored(stored) = elements else { return None };
        W::elements(stored)
    }

    #[inline(always)]
    fn run<O: Op>(path: Path, op: O) -> O::Output {
        path.run(op)
    }
    #[inline(always)]
    unsafe fn multiply<S: Simd, const R: usize, const P: usize>(
        s: S,
        sums: [[S::F; P]; R],
        x: Inputs,
        panels: [*const W::Raw; P],
        steps: usize,
        ask: impl Fn(usize, usize),
    ) -> [[S::F; P]; R] {
        let x = Rows { start: x.values, row_stride: 1, input_stride: R };
        // SAFETY: by the caller's contract, the tile and the panels are readable for `steps` steps.
        unsafe { product_on::<S, W, R, P>(s, sums, x, panels, steps, ask) }
    }
}

/// Dot products of bfloat16 pairs.
#[derive(Clone, Copy)]
pub(super) struct Dots;

impl MicroKernel for Dots {
    type Raw = u16;
    type Packing = PackPairs;

    fn elements(elements: &Elements) -> Option<&[u16]> {
        let Elements::Stored(stored) = elements else { return None };
        Bf16::elements(stored)
    }

    #[inline(always)]
    fn prefetch_block<S: Simd>(s: S, line: *const u8) {
        s.prefetch_far(line);
    }
    #[inline(always)]
    fn run<O: Op>(path: Path, op: O) -> O::Output {
        path.run_dots(op)
    }
    #[inline(always)]
    unsafe fn multiply<S: Simd, const R: usize, const P: usize>(
        s: S,
        sums: [[S::F; P]; R],
        x: Inputs,
        panels: [*const u16; P],
        steps: usize,
        ask: impl Fn(usize, usize),
    ) -> [[S::F; P]; R] {
        // SAFETY: by the caller's contract, the tile and the panels are readable for `steps` steps.
        unsafe { dot_product_on::<S, R, P>(s, sums, x.values.cast(), panels, steps, ask) }
    }
}

/// Block floating point: dot products of integers, scaled once per BFP block.
#[derive(Clone, Copy)]
pub(super) struct BlockFloat;

impl MicroKernel for BlockFloat {
    type Raw = u16;
    type Packing = PackBfpBlocks;

    fn elements(elements: &Elements) -> Option<&[u16]> {
        let Elements::BlockFloat(panels) = elements else { return None };
        Some(panels.data())
    }

    #[inline(always)]
    fn lines(steps: usize) -> usize {
        block_float::lines(steps)
    }
    #[inline(always)]
    fn run<O: Op>(path: Path, op: O) -> O::Output {
        path.run_int8(op)
    }
    #[inline(always)]
    unsafe fn multiply<S: Simd, const R: usize, const P: usize>(
        s: S,
        sums: [[S::F; P]; R],
        x: Inputs,
        panels: [*const u16; P],
        steps: usize,
        ask: impl Fn(usize, usize),
    ) -> [[S::F; P]; R] {
        let x = block_float::Inputs { pairs: x.values.cast(), powers: x.powers };
        // SAFETY: by the caller's contract, the tile and the panels are readable for `steps` steps.
        unsafe { block_float::product_on::<S, R, P>(s, sums, x, panels, steps, ask) }
    }
}
