//! The innermost loop in block floating point: a tile of `R` rows by `P` panels, one BFP block at a time.

use std::hint::black_box;

use super::{BFP_BLOCK_STEPS, SUPERBLOCK_STEPS};
use crate::cpu::memory::format::STEP;
use crate::cpu::simd::{LANES, Simd};

/// Addresses of a tile's activations, from the first superblock of the matrix product on.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Inputs {
    /// Pairs of integers. The pair of row `r` in step `i` is at `i * R + r`.
    pub(in crate::cpu) pairs: *const u32,
    /// Powers of two of the BFP blocks, `[blocks, R]`.
    pub(in crate::cpu) powers: *const f32,
}

/// Returns `sums` plus the matrix product of a tile's rows and the panels: lane `lane` of each `sums[r][p]` grows by
/// `Σ x[r][i] * panel[p][i][lane]` over `2 * steps` inputs `i`. The first input begins a superblock. Calls
/// `ask(p, line)` for each line of each panel, to prefetch later lines.
///
/// # Safety
///
/// `x` is readable for `R * steps` pairs and for the powers of their BFP blocks, and every panel for
/// [`super::lines`]`(steps)` lines.
#[inline(always)]
pub(in crate::cpu) unsafe fn product_on<S: Simd, const R: usize, const P: usize>(
    s: S,
    mut sums: [[S::F; P]; R],
    x: Inputs,
    panels: [*const u16; P],
    steps: usize,
    ask: impl Fn(usize, usize),
) -> [[S::F; P]; R] {
    // Registers hold the integer sums of one BFP block. The f32 sums over all blocks stay in memory: `black_box` keeps
    // the compiler from moving the f32 sums to registers and spilling the integer sums.
    let rest = black_box(sums.as_mut_ptr().cast::<S::F>());
    let Inputs { mut pairs, mut powers } = x;
    let (mut line, mut left) = (0, steps);
    while left > 0 {
        let exponents = line;
        (0..P).for_each(|p| ask(p, exponents));
        line += 1;
        for block in 0..SUPERBLOCK_STEPS / BFP_BLOCK_STEPS {
            let count = left.min(BFP_BLOCK_STEPS);
            // SAFETY: by the caller's contract, the pairs and the lines of this BFP block are readable.
            let dots = unsafe { block_dots::<S, R, P>(s, pairs, panels, line, count, &ask) };
            let mut of_panels = [s.splat(0.0); P];
            for (of_panel, panel) in of_panels.iter_mut().zip(panels) {
                // SAFETY: by the caller's contract, the superblock's line of exponents is readable.
                *of_panel = unsafe { s.powers(panel.add(exponents * STEP).cast::<u8>().add(block * LANES)) };
            }
            for (r, dots) in dots.iter().enumerate() {
                // SAFETY: by the caller's contract, the powers of a BFP block are readable.
                let power = s.splat(unsafe { *powers.add(r) });
                for (p, (&of_panel, &dots)) in of_panels.iter().zip(dots).enumerate() {
                    // SAFETY: `r * P + p` is the index of one of the `R * P` sums.
                    unsafe {
                        let sum = rest.add(r * P + p);
                        // Multiplication by a power of two is exact, so fused and separate rounding give the same
                        // result.
                        *sum = s.fma(s.floats(dots), s.mul(of_panel, power), *sum);
                    }
                }
            }
            left -= count;
            if left == 0 {
                break;
            }
            line += BFP_BLOCK_STEPS;
            (pairs, powers) = (pairs.wrapping_add(BFP_BLOCK_STEPS * R), powers.wrapping_add(R));
        }
    }
    sums
}

/// Number of steps per iteration of the unrolled loop.
const UNROLLED: usize = 4;

/// Returns the integer sums of one BFP block: sixteen lanes for each row and panel. The block has `count` steps and
/// begins with line `first` of each panel.
///
/// # Safety
///
/// `pairs` is readable for `R * count` pairs, and every panel for `count` lines from `first` on.
#[inline(always)]
unsafe fn block_dots<S: Simd, const R: usize, const P: usize>(
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
            // SAFETY: by the caller's contract, the pairs and the lines of all `count` steps are readable.
            unsafe { add_step(s, &mut dots, pairs.add(later * R), panels, first + later, ask) };
        }
        step += UNROLLED;
    }
    for last in step..count {
        // SAFETY: by the caller's contract, the pairs and the lines of all `count` steps are readable.
        unsafe { add_step(s, &mut dots, pairs.add(last * R), panels, first + last, ask) };
    }
    dots
}

/// Adds the dot products of one step (two inputs) to `dots`.
///
/// # Safety
///
/// `pairs` is readable for `R` pairs, and every panel at `line`.
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
        // SAFETY: by the caller's contract, every panel is readable at `line`.
        weights[p] = unsafe { s.load_i(panels[p].add(line * STEP)) };
    }
    // The loop over panels is the inner one, so that each pair is loaded once and used for all panels.
    for r in 0..R {
        for p in 0..P {
            // SAFETY: by the caller's contract, `R` pairs are readable.
            dots[r][p] = unsafe { s.dot_i16(dots[r][p], weights[p], pairs.add(r)) };
        }
    }
}
