//! The ways to multiply a tile of rows by panels.

use std::marker::PhantomData;

use super::super::block_float::{self, Factors, SPAN_STEPS};
use super::super::format::{Format, STEP};
use super::super::isa::Path;
use super::super::memory::Element;
use super::super::simd::{LANES, Op, Simd};
use super::super::tile::{Rows, dot_product_on, product_on};

/// How activations lie at the door.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// f32 for each input.
    Plain,
    /// The same, rounded to bfloat16.
    Rounded,
    /// A word for each two inputs: bfloat16.
    Pairs,
    /// A word for each two inputs: integers of spans. In the unused half of the tile's room, the spans' factors.
    Spans,
}

/// One of the ways.
pub(super) trait Way: Copy + Send + Sync + 'static {
    /// An element of a panel.
    type Raw: Element;
    /// Words that each input of a row takes at the door, twice.
    const WORDS_OF_TWO: usize;

    /// Runs `op` with all instructions that the way needs.
    fn run<O: Op>(path: Path, op: O) -> O::Output;

    /// `sums` with, to each `[r][p]`, sixteen lanes of a tile's rows by a panel over `2 * steps` inputs. In each step
    /// `ask(p, step)` asks for what will be wanted later.
    ///
    /// # Safety
    ///
    /// `x` stands for a tile of `R` rows, and it and the panels hold `steps` steps.
    unsafe fn multiply<S: Simd, const R: usize, const P: usize>(
        s: S,
        sums: [[S::F; P]; R],
        x: Inputs,
        panels: Panels<Self::Raw, P>,
        steps: usize,
        ask: impl Fn(usize, usize),
    ) -> [[S::F; P]; R];
}

/// Where a tile's inputs begin at the door.
#[derive(Clone, Copy)]
pub(super) struct Inputs {
    pub(super) values: *const f32,
    /// Of spans.
    pub(super) factors: *const f32,
}

/// Where panels begin.
#[derive(Clone, Copy)]
pub(super) struct Panels<T, const P: usize> {
    pub(super) steps: [*const T; P],
    /// Of spans.
    pub(super) exponents: [*const u8; P],
}

/// The elements of a matrix.
#[derive(Clone, Copy)]
pub(super) struct Data<'a, T> {
    pub(super) steps: &'a [T],
    /// Of spans; empty elsewhere.
    pub(super) exponents: &'a [u8],
    /// Steps of a panel.
    pub(super) of_panel: usize,
}

impl<T> Data<'_, T> {
    /// `count` steps of each of `P` panels from `panel` on, from step `first` on, which is a span's first.
    #[inline(always)]
    pub(super) fn panels<const P: usize>(&self, panel: usize, first: usize, count: usize) -> Panels<T, P> {
        let (mut steps, mut exponents) = ([self.steps.as_ptr(); P], [self.exponents.as_ptr(); P]);
        let of_panel = self.of_panel.div_ceil(SPAN_STEPS) * LANES;
        for p in 0..P {
            steps[p] = self.steps[((panel + p) * self.of_panel + first) * STEP..][..count * STEP].as_ptr();
            exponents[p] = exponents[p].wrapping_add((panel + p) * of_panel + first / SPAN_STEPS * LANES);
        }
        Panels { steps, exponents }
    }
}

/// Everything in f32; weights are widened.
#[derive(Clone, Copy)]
pub(super) struct Widened<W: Format>(PhantomData<W>);

impl<W: Format> Way for Widened<W> {
    type Raw = W::Raw;
    const WORDS_OF_TWO: usize = 2;

    #[inline(always)]
    fn run<O: Op>(path: Path, op: O) -> O::Output {
        path.run(op)
    }
    #[inline(always)]
    unsafe fn multiply<S: Simd, const R: usize, const P: usize>(
        s: S,
        sums: [[S::F; P]; R],
        x: Inputs,
        panels: Panels<W::Raw, P>,
        steps: usize,
        ask: impl Fn(usize, usize),
    ) -> [[S::F; P]; R] {
        let x = Rows { start: x.values, row_stride: 1, input_stride: R };
        // SAFETY: the caller's contract.
        unsafe { product_on::<S, W, R, P>(s, sums, x, panels.steps, steps, ask) }
    }
}

/// Dot products of bfloat16.
#[derive(Clone, Copy)]
pub(super) struct Dots;

impl Way for Dots {
    type Raw = u16;
    const WORDS_OF_TWO: usize = 1;

    #[inline(always)]
    fn run<O: Op>(path: Path, op: O) -> O::Output {
        path.run_dots(op)
    }
    #[inline(always)]
    unsafe fn multiply<S: Simd, const R: usize, const P: usize>(
        s: S,
        sums: [[S::F; P]; R],
        x: Inputs,
        panels: Panels<u16, P>,
        steps: usize,
        ask: impl Fn(usize, usize),
    ) -> [[S::F; P]; R] {
        // SAFETY: the caller's contract.
        unsafe { dot_product_on::<S, R, P>(s, sums, x.values.cast(), panels.steps, steps, ask) }
    }
}

/// Dot products of integers, in spans that share an exponent.
#[derive(Clone, Copy)]
pub(super) struct Spans;

impl Way for Spans {
    type Raw = u16;
    const WORDS_OF_TWO: usize = 1;

    #[inline(always)]
    fn run<O: Op>(path: Path, op: O) -> O::Output {
        path.run_int8(op)
    }
    #[inline(always)]
    unsafe fn multiply<S: Simd, const R: usize, const P: usize>(
        s: S,
        sums: [[S::F; P]; R],
        x: Inputs,
        panels: Panels<u16, P>,
        steps: usize,
        ask: impl Fn(usize, usize),
    ) -> [[S::F; P]; R] {
        let factors = Factors { x: x.factors, panels: panels.exponents };
        let x = x.values.cast();
        // SAFETY: the caller's contract.
        unsafe { block_float::product_on::<S, R, P>(s, sums, x, panels.steps, factors, steps, ask) }
    }
}
