//! The arg max of an LM head with a *screen*: an int8 copy of the head that is multiplied first. The screen shows which
//! panels can hold a row's largest logit, and the exact product computes only these panels. The result has the same
//! bits as the arg max of all logits.
//!
//! # The bound
//!
//! For a row, let `h` be the activations as the exact product multiplies them (packed: rounded to bfloat16, for
//! example), and `q` the activations in eight bits. For an output, let `w` be the weights as the exact product
//! multiplies them, and `v` the weights in eight bits. Without rounding, the logit is `h·w` and the screen's sum is
//! `q·v`, and
//!
//! ```text
//! |h·w - q·v| = |(h - q)·w + q·(w - v)| <= ‖h - q‖·‖w‖ + ‖q‖·‖w - v‖
//! ```
//!
//! by the inequality of Cauchy and Schwarz. [`RowNorms`] has the norms of `h`, `q` and `h - q`. [`Screen`] has, for
//! each panel, `W`: the largest `‖w‖` of its outputs, and `E`: the largest `‖w - v‖`. None of these numbers is less
//! than the true norm.
//!
//! Both products round, each operation by at most a relative 2^-24. With `n` inputs, each term of the exact product is
//! rounded at most `n` times, so the product is off by about `n·2^-24·Σ|h_i·w_i|`, at most `n·2^-24·‖h‖·‖w‖`. The
//! screen's sum has fewer roundings, and its terms add up to at most `‖q‖·‖v‖`, where `‖v‖ <= W + E`. The differences
//! that the norms measure and the sums below are rounded a few times more. Let `slack = (n + 8)·2^-22`, which is about
//! four times as much. Then the logit `y` and the screen's sum `z` satisfy
//!
//! ```text
//! |y - z| <= b = (‖h - q‖ + slack·(‖h‖ + ‖q‖))·W + (1 + slack)·‖q‖·E + tiny
//! ```
//!
//! `tiny` covers products and sums that underflow or are flushed; the norms cover denormal weights and activations.
//!
//! # The candidates
//!
//! Let `m` be the largest sum of a panel of the screen. The outputs that pad the last panel do not count. The panel's
//! largest logit is at least `m - b` and at most `m + b`. So the row's largest logit is at least the largest `m - b` of
//! all panels. A panel whose `m + b` is smaller holds neither the largest logit nor one that is equal. All other panels
//! are candidates.
//!
//! A row whose logits could be infinite or NaN has no such bound. Then all logits of the operation are computed. The
//! same happens if there are too many candidates, and [`Backoff`] then skips screens for a while.
//!
//! # Masks
//!
//! A row with a mask takes its largest allowed logit. All of the above holds for the allowed outputs alone: the others
//! count as little as those that pad the last panel. If the mask allows outputs of few panels, these panels are the
//! candidates, and the row needs neither screen nor bound. An operation with only such rows does not read the screen,
//! so heads without a screen have it, too.

pub mod inspect;

use crate::cpu::gemm::groups::Group;
use crate::cpu::gemm::input::Input;
use crate::cpu::gemm::{self, Candidate, Epilogue, Layout, Product};
use crate::cpu::memory::Shared;
use crate::cpu::memory::matrix::Matrix;
use crate::cpu::quant::Scratch as QuantScratch;
use crate::cpu::quant::int8::{self, RowNorms, Screen};
use crate::cpu::sampling::argmax::PartialArgmax;
use crate::cpu::sampling::mask::RowMasks;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeviceError, TokenMask};

/// Limit of a row's logits and partial sums. Rows that could exceed this limit are not screened.
const MOST: f32 = 1e37;
/// The part of a bound that covers underflow. It is far more than the largest error by underflow, 2^-118 per block of
/// inputs.
const TINY: f32 = 1e-30;
/// Maximum number of panels of a row whose candidates are all panels that its mask allows.
const MOST_LISTED: usize = 64;

/// Counts of a device's uses of screens, since the device was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScreenCounts {
    /// Number of arg max operations that a screen has shortened.
    pub screened: u64,
    /// Number of pairs of a panel and a row that these operations, and rows with a mask of few panels, multiplied
    /// exactly.
    pub pairs: u64,
    /// Number of arg max operations that multiplied a screen but had to compute all logits anyway.
    pub failed: u64,
    /// Number of rows whose mask named the panels that were multiplied exactly.
    pub listed: u64,
}

/// The operands of an arg max with a screen or masks.
pub(in crate::cpu) struct Operands<'a> {
    pub(in crate::cpu) path: Path,
    pub(in crate::cpu) pool: &'a mut ThreadPool,
    pub(in crate::cpu) int8: &'a mut QuantScratch,
    pub(in crate::cpu) products: &'a mut gemm::Scratch,
    pub(in crate::cpu) x: Input<'a>,
    pub(in crate::cpu) rows: usize,
    pub(in crate::cpu) matrix: &'a Matrix,
    pub(in crate::cpu) masks: RowMasks<'a>,
    pub(in crate::cpu) partial: PartialArgmax<'a>,
    /// Scratch memory, `[rows, outputs]`.
    pub(in crate::cpu) logits: &'a mut [f32],
}

/// Scratch memory of screened arg max operations, the backoff after failures, and counts.
#[derive(Default)]
pub(in crate::cpu) struct Scratch {
    /// The coefficients of each row's error bounds.
    bounds: Vec<RowBound>,
    /// The screen's largest sum of each row and panel, `[rows, panels]`.
    maxima: Vec<f32>,
    /// A bit for each row and panel, `[rows, panels / 16]`. The bits of candidates are set.
    marks: Vec<u16>,
    /// For each row, whether its mask names its candidates.
    listed: Vec<bool>,
    candidates: Vec<Candidate>,
    backoff: Backoff,
    counts: ScreenCounts,
}

impl Scratch {
    /// Makes room for arg max operations of up to `rows` rows with a head.
    pub(in crate::cpu) fn fit(&mut self, rows: usize, head: &Matrix) {
        let panels = head.shape.panels();
        let Self { bounds, maxima, marks, listed, candidates, .. } = self;
        if head.screen.is_some() {
            grow(bounds, rows);
            grow(maxima, rows * panels);
        }
        grow(marks, rows * panels.div_ceil(LANES));
        grow(listed, rows);
        candidates.clear();
        candidates.reserve(most_candidates(rows, panels) + rows * most_listed(panels) + 1);
    }

    /// Size in bytes.
    pub(in crate::cpu) fn bytes(&self) -> usize {
        let Self { bounds, maxima, marks, listed, candidates, .. } = self;
        size_of_val(&bounds[..])
            + size_of_val(&maxima[..])
            + size_of_val(&marks[..])
            + size_of_val(&listed[..])
            + candidates.capacity() * size_of::<Candidate>()
    }

    pub(in crate::cpu) fn counts(&self) -> ScreenCounts {
        self.counts
    }

    /// Updates the arg max of all rows with all logits that can be a row's largest. Returns false if neither the screen
    /// nor masks can tell which. The arg max is then unchanged, and the caller must compute all logits. [`Self::fit`]
    /// must have made room for the rows.
    pub(in crate::cpu) fn find_largest(&mut self, operands: Operands<'_>) -> Result<bool, DeviceError> {
        let Operands { path, pool, int8, products, x, rows, matrix, masks, partial, logits } = operands;
        if rows == 0 {
            return Ok(false);
        }
        let (shape, layout) = (matrix.shape, Layout::of(&matrix.data));
        let (panels, blocks) = (shape.panels(), shape.panels().div_ceil(LANES));
        let (listed, marks) = (&mut self.listed[..rows], &mut self.marks[..rows * blocks]);
        for (row, (listed, marks)) in listed.iter_mut().zip(marks.chunks_mut(blocks)).enumerate() {
            *listed = masks.of(row).is_some_and(|mask| list(mask, panels, marks));
        }
        let screened = listed.iter().filter(|listed| !**listed).count();
        if screened > 0 {
            let Some(screen) = &matrix.screen else { return Ok(false) };
            if !self.backoff.admits() {
                return Ok(false);
            }
            let bounds = Shared::new(&mut self.bounds[..rows]);
            pool.run(rows, |row, _| {
                let norms = RowNorms::of(path, x, row, shape.inputs, layout);
                // SAFETY: each task accesses only the bound of its own row.
                unsafe { bounds.slice_mut(row, 1)[0] = RowBound::new(norms, shape.inputs, screen.most) };
            })?;
            let (bounds, listed) = (&self.bounds[..rows], &self.listed[..rows]);
            if !bounds.iter().zip(listed).all(|(bound, listed)| bound.sound || *listed) {
                return Ok(false);
            }

            let maxima = Shared::new(&mut self.maxima[..rows * panels]);
            let product = Product {
                x,
                groups: &[Group::whole(rows)],
                matrices: std::slice::from_ref(screen.head()),
                epilogue: Epilogue::PanelMaxima(&maxima, masks),
                out: logits,
            };
            int8::linear(path, pool, int8, product)?;
            let maxima = &self.maxima[..rows * panels];
            let marks = Shared::new(&mut self.marks[..rows * blocks]);
            pool.run(rows, |row, _| {
                if listed[row] {
                    return;
                }
                // SAFETY: each task accesses only the marks of its own row.
                let marks = unsafe { marks.slice_mut(row * blocks, blocks) };
                let maxima = &maxima[row * panels..][..panels];
                path.run(Mark { maxima, screen, bound: bounds[row], marks });
            })?;
        }

        let most = match screened {
            0 => 0,
            screened => most_candidates(screened, panels),
        } + (rows - screened) * most_listed(panels);
        collect(&self.marks[..rows * blocks], blocks, most, &mut self.candidates);
        if self.candidates.len() > most {
            self.backoff.failed();
            self.counts.failed += 1;
            return Ok(false);
        }
        if screened > 0 {
            self.backoff.succeeded();
            self.counts.screened += 1;
        }
        self.counts.pairs += self.candidates.len() as u64;
        self.counts.listed += (rows - screened) as u64;
        gemm::find_largest(path, pool, products, (x, rows), (matrix, &self.candidates), partial)?;
        Ok(true)
    }
}

/// Makes a list at least `len` long.
fn grow<T: Clone + Default>(list: &mut Vec<T>, len: usize) {
    if list.len() < len {
        list.reserve_exact(len - list.len());
        list.resize(len, T::default());
    }
}

/// Maximum number of candidates for which the screen saves time: one per row, and a quarter of the panels for up to
/// sixteen rows. For more rows, the exact product takes proportionally longer, so more candidates pay off.
fn most_candidates(rows: usize, panels: usize) -> usize {
    rows + panels * rows.max(16) / 64
}

/// Maximum number of panels whose outputs a mask allows, for a row that needs no screen. A quarter of all panels, as
/// for a screen's candidates.
fn most_listed(panels: usize) -> usize {
    MOST_LISTED.min(panels / 4)
}

/// Marks the panels with an output that the mask allows. Returns false if there are too many.
fn list(mask: &TokenMask, panels: usize, marks: &mut [u16]) -> bool {
    marks.fill(0);
    let mut left = most_listed(panels);
    for (word, &allowed) in mask.words().iter().enumerate().filter(|(_, allowed)| **allowed != 0) {
        for (half, outputs) in [allowed & 0xFFFF, allowed >> 16].into_iter().enumerate() {
            // A word has the bits of two panels.
            let panel = 2 * word + half;
            if outputs == 0 || panel >= panels {
                continue;
            }
            if left == 0 {
                return false;
            }
            left -= 1;
            marks[panel / LANES] |= 1 << (panel % LANES);
        }
    }
    true
}

/// Appends the candidates that `marks` (`[rows, blocks]`) holds, in order. Stops when there are more than `most`.
fn collect(marks: &[u16], blocks: usize, most: usize, candidates: &mut Vec<Candidate>) {
    candidates.clear();
    for (row, marks) in (0..).zip(marks.chunks(blocks)) {
        for (first, &mark) in (0..).step_by(LANES).zip(marks) {
            let mut left = mark;
            while left != 0 {
                candidates.push(Candidate { panel: first + left.trailing_zeros(), row });
                left &= left - 1;
            }
            if candidates.len() > most {
                return;
            }
        }
    }
    candidates.sort_unstable();
}

/// The coefficients of a row's error bounds. The bound of a panel is `weights * W + errors * E + TINY`, with the norms
/// `W` and `E` of the module's documentation.
#[derive(Clone, Copy, Debug, Default)]
struct RowBound {
    /// The coefficient of `W`, the largest norm of an output's weights in the panel.
    weights: f32,
    /// The coefficient of `E`, the largest norm of the errors of an output's weights in the panel.
    errors: f32,
    /// True if all logits are finite.
    sound: bool,
}

impl RowBound {
    /// `most` is the largest norm of an output's weights plus the largest of their errors.
    fn new(norms: RowNorms, inputs: usize, most: f32) -> Self {
        let RowNorms { exact, quantised, difference } = norms;
        let slack = (inputs + 8) as f32 / (1 << 22) as f32;
        Self {
            weights: difference + slack * (exact + quantised),
            errors: (1.0 + slack) * quantised,
            // If a norm is NaN, the comparison is false.
            sound: (exact + quantised) * most < MOST,
        }
    }
}

/// Marks a row's candidates.
struct Mark<'a> {
    /// The largest sum of each panel.
    maxima: &'a [f32],
    screen: &'a Screen,
    bound: RowBound,
    /// A bit per panel.
    marks: &'a mut [u16],
}

impl Op for Mark<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { maxima, screen, bound, marks } = self;
        let panels = || {
            let norms = screen.weights.chunks(LANES).zip(screen.errors.chunks(LANES));
            maxima.chunks(LANES).zip(norms)
        };
        let mut least = s.splat(f32::NEG_INFINITY);
        for (maxima, (weights, errors)) in panels() {
            let bounds = bound.of(s, weights, errors);
            least = s.max(s.sub(s.load_some(maxima, f32::NEG_INFINITY), bounds), least);
        }
        let least = s.largest(least);
        for ((maxima, (weights, errors)), mark) in panels().zip(marks) {
            let most = s.add(s.load_some(maxima, f32::NEG_INFINITY), bound.of(s, weights, errors));
            *mark = 0;
            if s.largest(most) >= least {
                let mut lanes = [0.0; LANES];
                s.store_some(&mut lanes, most);
                for (lane, &most) in lanes.iter().enumerate() {
                    *mark |= u16::from(most >= least) << lane;
                }
            }
        }
    }
}

impl RowBound {
    /// Returns the bounds of up to sixteen panels.
    #[inline(always)]
    fn of<S: Simd>(self, s: S, weights: &[f32], errors: &[f32]) -> S::F {
        let errors = s.fma(s.splat(self.errors), s.load_some(errors, 0.0), s.splat(TINY));
        s.fma(s.splat(self.weights), s.load_some(weights, 0.0), errors)
    }
}

/// Skips screens after failures: 8 operations after the first failure, twice as many after each further one, up to
/// [`Self::MOST`]. A success resets the number. Results do not depend on skips.
#[derive(Debug, Default)]
struct Backoff {
    /// Number of operations that are still skipped.
    left: u32,
    /// Number of operations that the last failure skipped; 0 after a success.
    last: u32,
}

impl Backoff {
    const LEAST: u32 = 8;
    const MOST: u32 = 1024;

    /// True if the next operation may use its screen.
    fn admits(&mut self) -> bool {
        let admits = self.left == 0;
        self.left = self.left.saturating_sub(1);
        admits
    }

    fn failed(&mut self) {
        self.last = (2 * self.last).clamp(Self::LEAST, Self::MOST);
        self.left = self.last;
    }

    fn succeeded(&mut self) {
        self.last = 0;
    }
}

#[cfg(test)]
mod tests;
