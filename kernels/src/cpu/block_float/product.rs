//! The innermost loop: a tile of `R` rows by `P` panels, span by span.

use std::hint::black_box;

use super::super::format::STEP;
use super::super::simd::{LANES, Simd};
use super::{SPAN_STEPS, STRETCH_STEPS};

/// Where a tile's inputs lie, from the stretch on that a product begins with.
#[derive(Clone, Copy)]
pub(in super::super) struct Inputs {
    /// Pairs: of row `r` in step `i` at `i * R + r`.
    pub(in super::super) pairs: *const u32,
    /// `[spans, R]`.
    pub(in super::super) powers: *const f32,
}

/// `sums` with, to each `[r][p]`, sixteen lanes of `Σ x[r][i] * panel[p][i][lane]` over `2 * steps` inputs, which begin with
/// a stretch. For each line of each panel, `ask(p, line)` asks for what will be wanted later.
///
/// # Safety
///
/// `x` is readable for `R * steps` pairs and the powers of as many spans, every panel for [`super::lines`] of so many steps.
#[inline(always)]
pub(in super::super) unsafe fn product_on<S: Simd, const R: usize, const P: usize>(
    s: S,
    mut sums: [[S::F; P]; R],
    x: Inputs,
    panels: [*const u16; P],
    steps: usize,
    ask: impl Fn(usize, usize),
) -> [[S::F; P]; R] {
    // Registers hold the sums of a span. Those of all spans are better off in memory, so the compiler is told that it has
    // to leave them there.
    let rest = black_box(sums.as_mut_ptr().cast::<S::F>());
    let Inputs { mut pairs, mut powers } = x;
    let (mut line, mut left) = (0, steps);
    while left > 0 {
        let exponents = line;
        (0..P).for_each(|p| ask(p, exponents));
        line += 1;
        for span in 0..STRETCH_STEPS / SPAN_STEPS {
            let count = left.min(SPAN_STEPS);
            // SAFETY: the caller's contract.
            let dots = unsafe { span_of::<S, R, P>(s, pairs, panels, line, count, &ask) };
            let mut of_panels = [s.splat(0.0); P];
            for (of_panel, panel) in of_panels.iter_mut().zip(panels) {
                // SAFETY: the caller's contract: the line of exponents.
                *of_panel = unsafe { s.powers(panel.add(exponents * STEP).cast::<u8>().add(span * LANES)) };
            }
            for (r, dots) in dots.iter().enumerate() {
                // SAFETY: the caller's contract: the powers of a span.
                let power = s.splat(unsafe { *powers.add(r) });
                for (p, (&of_panel, &dots)) in of_panels.iter().zip(dots).enumerate() {
                    // SAFETY: one of the sums.
                    unsafe {
                        let sum = rest.add(r * P + p);
                        // Powers of two change no digits: fused or not is the same.
                        *sum = s.fma(s.floats(dots), s.mul(of_panel, power), *sum);
                    }
                }
            }
            left -= count;
            if left == 0 {
                break;
            }
            line += SPAN_STEPS;
            (pairs, powers) = (pairs.wrapping_add(SPAN_STEPS * R), powers.wrapping_add(R));
        }
    }
    sums
}

/// Steps that are written out one after the other.
const UNROLLED: usize = 4;

/// `dots[r][p]`: sixteen lanes of a span of `count` steps, from line `first` of the panels on.
///
/// # Safety
///
/// `pairs` is readable for `R * count` pairs, and every panel for so many lines.
#[inline(always)]
unsafe fn span_of<S: Simd, const R: usize, const P: usize>(
    s: S,
    pairs: *const u32,
    panels: [*const u16; P],
    first: usize,
    count: usize,
    ask: &impl Fn(usize, usize),
) -> [[S::I; P]; R] {
    let mut dots = [[s.splat_i(0); P]; R];
    let mut step = 0;
    while step + UNROLLED <= count {
        for later in step..step + UNROLLED {
            // SAFETY: the caller's contract.
            unsafe { add_step(s, &mut dots, pairs.add(later * R), panels, first + later, ask) };
        }
        step += UNROLLED;
    }
    for last in step..count {
        // SAFETY: the caller's contract.
        unsafe { add_step(s, &mut dots, pairs.add(last * R), panels, first + last, ask) };
    }
    dots
}

/// # Safety
///
/// `pairs` is readable for `R` pairs, and every panel at this line.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // The compiler does not unroll iterators over several arrays at once.
unsafe fn add_step<S: Simd, const R: usize, const P: usize>(
    s: S,
    dots: &mut [[S::I; P]; R],
    pairs: *const u32,
    panels: [*const u16; P],
    line: usize,
    ask: &impl Fn(usize, usize),
) {
    let mut weights = [s.splat_i(0); P];
    for p in 0..P {
        ask(p, line);
        // SAFETY: the caller's contract.
        weights[p] = unsafe { s.load_i(panels[p].add(line * STEP)) };
    }
    // Panels inside: each load of a pair feeds all of them.
    for r in 0..R {
        for p in 0..P {
            // SAFETY: the caller's contract.
            dots[r][p] = unsafe { s.dot_i16(dots[r][p], weights[p], pairs.add(r)) };
        }
    }
}
