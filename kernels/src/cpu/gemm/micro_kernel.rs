//! Micro-kernels: how a tile of rows is multiplied by panels, and how its activations are laid out for that.

use std::marker::PhantomData;

use crate::cpu::gemm::tile::{Rows, dot_product_on, product_on};
use crate::cpu::memory::Element;
use crate::cpu::memory::format::{Format, STEP};
use crate::cpu::quant::block_float;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{Op, Simd};

/// How the activations of a tile are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// f32 for each input.
    Plain,
    /// The same, rounded to bfloat16.
    Rounded,
    /// A word for each two inputs: bfloat16.
    Pairs,
    /// A word for each two inputs: integers of spans. In the unused half of the tile's room, the spans' powers of two.
    BlockFloat,
}

impl Layout {
    /// Words that a step takes, which is two inputs of a row.
    pub(super) const fn step_words(self) -> usize {
        match self {
            Self::Plain | Self::Rounded => 2,
            Self::Pairs | Self::BlockFloat => 1,
        }
    }
}

/// A micro-kernel: the innermost loop of a product for one kind of weights.
pub(super) trait MicroKernel: Copy + Send + Sync + 'static {
    /// An element of a panel.
    type Raw: Element;
    const LAYOUT: Layout;

    /// Lines of [`STEP`] elements that so many steps take; those before a step that is the first of a block.
    #[inline(always)]
    fn lines(steps: usize) -> usize {
        steps
    }

    /// Runs `op` with all instructions that the micro-kernel needs.
    fn run<O: Op>(path: Path, op: O) -> O::Output;

    /// `sums` with, to each `[r][p]`, sixteen lanes of a tile's rows by a panel over `2 * steps` inputs. For each
    /// line of each panel, `ask(p, line)` asks for what will be wanted later.
    ///
    /// # Safety
    ///
    /// `x` stands for a tile of `R` rows, and it and the panels hold `steps` steps.
    unsafe fn multiply<S: Simd, const R: usize, const P: usize>(
        s: S,
        sums: [[S::F; P]; R],
        x: Inputs,
        panels: [*const Self::Raw; P],
        steps: usize,
        ask: impl Fn(usize, usize),
    ) -> [[S::F; P]; R];
}

/// Where a tile's activations begin.
#[derive(Clone, Copy)]
pub(super) struct Inputs {
    pub(super) values: *const f32,
    /// The powers of two of spans; any address where the layout has none.
    pub(super) powers: *const f32,
}

/// The elements of a matrix: panels of lines.
#[derive(Clone, Copy)]
pub(super) struct Data<'a, K: MicroKernel> {
    pub(super) elements: &'a [K::Raw],
    /// Steps of a panel.
    pub(super) steps: usize,
}

impl<K: MicroKernel> Data<'_, K> {
    /// Where step `first` of a panel is, from which on there are `count`.
    #[inline(always)]
    pub(super) fn steps(&self, panel: usize, first: usize, count: usize) -> *const K::Raw {
        let line = panel * K::lines(self.steps) + K::lines(first);
        self.elements[line * STEP..][..K::lines(count) * STEP].as_ptr()
    }

    /// The same, as an address to ask for, wherever that is.
    #[inline(always)]
    pub(super) fn address(&self, panel: usize, first: usize) -> *const u8 {
        let line = panel * K::lines(self.steps) + K::lines(first);
        self.elements.as_ptr().wrapping_add(line * STEP).cast()
    }
}

/// Everything in f32; weights are widened.
#[derive(Clone, Copy)]
pub(super) struct Widened<W: Format>(PhantomData<W>);

impl<W: Format> MicroKernel for Widened<W> {
    type Raw = W::Raw;
    // Activations are as precise as the weights.
    const LAYOUT: Layout = if W::IS_BF16 { Layout::Rounded } else { Layout::Plain };

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
        // SAFETY: the caller's contract.
        unsafe { product_on::<S, W, R, P>(s, sums, x, panels, steps, ask) }
    }
}

/// Dot products of bfloat16.
#[derive(Clone, Copy)]
pub(super) struct Dots;

impl MicroKernel for Dots {
    type Raw = u16;
    const LAYOUT: Layout = Layout::Pairs;

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
        // SAFETY: the caller's contract.
        unsafe { dot_product_on::<S, R, P>(s, sums, x.values.cast(), panels, steps, ask) }
    }
}

/// Dot products of integers, in spans that share an exponent.
#[derive(Clone, Copy)]
pub(super) struct BlockFloat;

impl MicroKernel for BlockFloat {
    type Raw = u16;
    const LAYOUT: Layout = Layout::BlockFloat;

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
        // SAFETY: the caller's contract.
        unsafe { block_float::product_on::<S, R, P>(s, sums, x, panels, steps, ask) }
    }
}
