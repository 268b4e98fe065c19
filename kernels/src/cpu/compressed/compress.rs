//! The compressors: each turns the tokens of a window into one entry.
//!
//! The weights of a window's tokens are a softmax per channel, which is summed as it goes (Milakov and Gimelshein,
//! arXiv:1805.02867), one token after another. An entry depends on its own window's tokens and, if windows overlap, on
//! those of the window before. So windows are computed independently: each starts from the slot's open states if its
//! first tokens are in an earlier step, and from nothing otherwise. The slot's states are updated behind all windows.

use super::Scratch;
use crate::cpu::attention::grown;
use crate::cpu::memory::Shared;
use crate::cpu::memory::entries::{EntriesPool, EntryLayout};
use crate::cpu::memory::format::{Format, with_format};
use crate::cpu::memory::slots::SlotStates;
use crate::cpu::rowwise::{cos_sin, rms_factor};
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd, exp};
use crate::cpu::step::{Row, Step};
use crate::cpu::threads::pool::ThreadPool;
use crate::{CompressorShape, DeviceError, PageId, RopeFrequencies, SlotId};

/// Number of channels whose states a task updates.
const CHANNELS: usize = 128;

/// A window that the step closes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    /// Index of the row.
    row: usize,
    /// Index of the window in its request, and of its entry.
    index: usize,
}

/// The operands of [`compress`], without the pool that receives the entries.
pub(in crate::cpu) struct Compressor<'a> {
    /// `[tokens, shape.projected()]`.
    pub(in crate::cpu) projected: &'a [f32],
    pub(in crate::cpu) shape: CompressorShape,
    /// `[ratio, parts * width]`.
    pub(in crate::cpu) offsets: &'a [f32],
    /// Weight and epsilon of the norm of an entry.
    pub(in crate::cpu) norm: (&'a [f32], f32),
    pub(in crate::cpu) rope: &'a RopeFrequencies,
    pub(in crate::cpu) states: SlotStates<'a>,
}

/// Compresses the step's tokens. The caller has checked the operands and the step's pages.
pub(in crate::cpu) fn compress(
    path: Path,
    pool: &mut ThreadPool,
    step: &Step,
    scratch: &mut Scratch,
    compressor: &Compressor<'_>,
    (entries, layer): (&mut EntriesPool, usize),
) -> Result<(), DeviceError> {
    let CompressorShape { ratio, width, .. } = compressor.shape;
    let Scratch { floats, windows, .. } = scratch;
    windows.clear();
    for (index, row) in step.rows.iter().enumerate().filter(|(_, row)| row.slot != SlotId::NULL) {
        let closed = row.start / ratio..(row.start + row.tokens) / ratio;
        windows.extend(closed.map(|window| Window { row: index, index: window }));
    }
    let floats = Shared::new(grown(floats, pool.threads() * width)?);
    let layout = EntryLayout::new(&entries.shape, layer);
    with_format!(&mut entries.data, Fmt, data => {
        let data = Shared::new(&mut data[..]);
        pool.run(windows.len(), |task, thread| {
            let Window { row, index } = windows[task];
            let (row, table) = (&step.rows[row], step.block_table(&step.rows[row]));
            // The null page takes no entry.
            if layout.page(table, index) == PageId::NULL {
                return;
            }
            // SAFETY: each thread accesses only its own range, and runs one task at a time.
            let entry = unsafe { floats.slice_mut(thread * width, width) };
            path.run(Entry { compressor, row, window: index, out: &mut *entry });
            let elements = layout.entry(table, index);
            // SAFETY: each entry belongs to one task, since no two rows write to one page.
            let stored = unsafe { data.slice_mut(elements.start, width) };
            stored.iter_mut().zip(&*entry).for_each(|(stored, &x)| *stored = Fmt::narrow(x));
        })
    })?;
    let blocks = width.div_ceil(CHANNELS);
    pool.run(step.rows.len() * blocks, |task, _| {
        let (row, first) = (&step.rows[task / blocks], task % blocks * CHANNELS);
        if row.slot != SlotId::NULL {
            path.run(Update { compressor, row, first, end: width.min(first + CHANNELS) });
        }
    })
}

/// The running softmax of sixteen channels. It is empty if `sum` is 0, whatever the other values are.
#[derive(Clone, Copy)]
struct State<F> {
    largest: F,
    sum: F,
    /// The weighted sum of the tokens' k.
    weighted: F,
}

impl<F: Copy> State<F> {
    #[inline(always)]
    fn empty<S: Simd<F = F>>(s: S) -> Self {
        Self { largest: s.splat(0.0), sum: s.splat(0.0), weighted: s.splat(0.0) }
    }

    /// `empty` in lanes in which `self` is empty, and `full` in the others.
    #[inline(always)]
    fn select<S: Simd<F = F>>(self, s: S, empty: Self, full: Self) -> Self {
        // The sum of a state with a token is at least 1, and a sum that is NaN belongs to a token.
        let least = s.splat(f32::MIN_POSITIVE);
        let pick = |empty, full| s.less(self.sum, least, empty, full);
        Self {
            largest: pick(empty.largest, full.largest),
            sum: pick(empty.sum, full.sum),
            weighted: pick(empty.weighted, full.weighted),
        }
    }

    /// Adds a token.
    #[inline(always)]
    fn add<S: Simd<F = F>>(self, s: S, gate: F, k: F) -> Self {
        let Self { largest, sum, weighted } = self;
        // With `n` the larger of `largest` and `gate`, one of the factors e^(largest - n) and e^(gate - n) is 1.
        let low = s.less(largest, gate, s.sub(largest, gate), s.sub(gate, largest));
        let (low, one) = (exp(s, low), s.splat(1.0));
        let (decay, weight) = (s.less(largest, gate, low, one), s.less(largest, gate, one, low));
        let full = Self {
            largest: s.max(largest, gate),
            sum: s.fma(sum, decay, weight),
            weighted: s.fma(weighted, decay, s.mul(k, weight)),
        };
        self.select(s, Self { largest: gate, sum: one, weighted: k }, full)
    }

    /// Adds the tokens of another state.
    #[inline(always)]
    fn merge<S: Simd<F = F>>(self, s: S, other: Self) -> Self {
        let largest = s.max(self.largest, other.largest);
        let own = exp(s, s.sub(self.largest, largest));
        let others = exp(s, s.sub(other.largest, largest));
        let full = Self {
            largest,
            sum: s.fma(self.sum, own, s.mul(other.sum, others)),
            weighted: s.fma(self.weighted, own, s.mul(other.weighted, others)),
        };
        self.select(s, other, other.select(s, self, full))
    }
}

impl Compressor<'_> {
    /// Index of the state of an open window's part among the states in a slot.
    fn open(&self, part: usize) -> usize {
        if self.shape.parts == 2 { 1 + part } else { 0 }
    }

    /// Index, in a slot's states, of a channel's first element in state `state`. Elements of the same channel are
    /// `width` apart.
    fn at(&self, state: usize, channel: usize) -> usize {
        state * 3 * self.shape.width + channel
    }

    /// Loads a state from a row's slot, in the channels `first .. end`, which are at most sixteen.
    #[inline(always)]
    fn load<S: Simd>(&self, s: S, row: &Row, state: usize, first: usize, end: usize) -> State<S::F> {
        let at = self.at(state, first);
        let [largest, sum, weighted] = [0, 1, 2].map(|element| {
            // SAFETY: states are written behind all tasks that make entries. The tasks that write them access channels
            // of their own, and hold no slice that allows writes while they load.
            let part = unsafe { self.states.read(row.slot, at + element * self.shape.width, end - first) };
            s.load_some(part, 0.0)
        });
        State { largest, sum, weighted }
    }

    /// The state of a part of `window`, over the window's tokens up to the end of the row. The window ends behind the
    /// row's first token.
    #[inline(always)]
    fn running<S: Simd>(
        &self,
        s: S,
        row: &Row,
        (part, window): (usize, usize),
        first: usize,
        end: usize,
    ) -> State<S::F> {
        let CompressorShape { ratio, width, parts } = self.shape;
        let begin = window * ratio;
        let mut state = match begin < row.start {
            true => self.load(s, row, self.open(part), first, end),
            false => State::empty(s),
        };
        let (k, gates) = (part * width, (parts + part) * width);
        for position in begin.max(row.start)..(begin + ratio).min(row.start + row.tokens) {
            let token = row.first_token + position - row.start;
            let projected = &self.projected[token * self.shape.projected()..][..self.shape.projected()];
            let offsets = &self.offsets[position % ratio * parts * width + k..][..width];
            let gate = s.add(
                s.load_some(&projected[gates + first..gates + end], 0.0),
                s.load_some(&offsets[first..end], 0.0),
            );
            state = state.add(s, gate, s.load_some(&projected[k + first..k + end], 0.0));
        }
        state
    }

    /// The state of the first part of the window before `window`, which is empty for the first window.
    #[inline(always)]
    fn previous<S: Simd>(&self, s: S, row: &Row, window: usize, first: usize, end: usize) -> State<S::F> {
        match window.checked_sub(1) {
            None => State::empty(s),
            // The window before was closed in an earlier step.
            Some(_) if window * self.shape.ratio <= row.start => self.load(s, row, 0, first, end),
            Some(before) => self.running(s, row, (0, before), first, end),
        }
    }
}

/// The entry of one window.
struct Entry<'a> {
    compressor: &'a Compressor<'a>,
    row: &'a Row,
    window: usize,
    out: &'a mut [f32],
}

impl Op for Entry<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { compressor, row, window, out } = self;
        let CompressorShape { ratio, width, parts } = compressor.shape;
        for first in (0..width).step_by(LANES) {
            let end = width.min(first + LANES);
            let mut state = compressor.running(s, row, (parts - 1, window), first, end);
            if parts == 2 {
                state = compressor.previous(s, row, window, first, end).merge(s, state);
            }
            s.store_some(&mut out[first..end], s.div(state.weighted, state.sum));
        }
        let (weight, eps) = compressor.norm;
        let factor = s.splat(rms_factor(s, out, eps));
        for (x, weight) in out.chunks_mut(LANES).zip(weight.chunks(LANES)) {
            let normal = s.mul(s.load_some(x, 0.0), factor);
            s.store_some(x, s.mul(normal, s.load_some(weight, 0.0)));
        }
        let rope = compressor.rope;
        let position = (window * ratio) as f32;
        let rotated = &mut out[width - 2 * rope.inverse.len()..];
        for (pair, &inverse) in rotated.as_chunks_mut::<2>().0.iter_mut().zip(&rope.inverse) {
            let (cos, sin) = cos_sin(position, inverse, rope.scale);
            let [a, b] = *pair;
            *pair = [a * cos - b * sin, b * cos + a * sin];
        }
    }
}

/// The states of a row's slot behind the row's tokens, in the channels `first .. end`.
struct Update<'a> {
    compressor: &'a Compressor<'a>,
    row: &'a Row,
    first: usize,
    end: usize,
}

impl Op for Update<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { compressor, row, first, end } = self;
        let CompressorShape { ratio, width, parts } = compressor.shape;
        let open = (row.start + row.tokens) / ratio;
        let store = |state: usize, first: usize, end: usize, values: State<S::F>| {
            let at = compressor.at(state, first);
            for (element, x) in [values.largest, values.sum, values.weighted].into_iter().enumerate() {
                // SAFETY: no other task accesses these channels of the slot, and this task holds one slice at a time.
                let to = unsafe { compressor.states.part(row.slot, at + element * width, end - first) };
                s.store_some(to, x);
            }
        };
        for first in (first..end).step_by(LANES) {
            let end = end.min(first + LANES);
            // All states are computed before one is stored.
            let previous = (parts == 2).then(|| compressor.previous(s, row, open, first, end));
            for part in 0..parts {
                // A window without tokens has an empty state, which is stored as zeros.
                let state = compressor.running(s, row, (part, open), first, end);
                store(compressor.open(part), first, end, state);
            }
            if let Some(previous) = previous {
                store(0, first, end, previous);
            }
        }
    }
}
