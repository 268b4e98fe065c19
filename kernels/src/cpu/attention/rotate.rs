//! Preparation of each token's queries, keys and values for attention: norms, rotation, and storing of keys and values
//! in pages.

use std::ops::Range;

use crate::cpu::memory::Shared;
use crate::cpu::memory::format::{STEP, with_format};
use crate::cpu::memory::kv::{Fp8, KvData, KvFormat, KvPool, Layout, VALUE_PANEL};
use crate::cpu::rowwise::rms_factor;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};
use crate::cpu::step::{Row, Step};
use crate::cpu::threads::pool::ThreadPool;
use crate::{AttentionShape, DeviceError, KvScales, PageId};

/// Minimum and maximum number of tokens per task. Waking a thread for a single token costs more than it saves. Sixteen
/// tokens fill a panel, and the panel's cache lines stay in the cache while one task fills it.
const SHARE: (usize, usize) = (2, LANES);

/// Number of elements of a head that are converted to the pages' format at a time.
const NARROW: usize = 8 * LANES;

/// Weights of the RMS norms of the heads of q and k.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Norms<'a> {
    pub(in crate::cpu) q: &'a [f32],
    pub(in crate::cpu) k: &'a [f32],
    pub(in crate::cpu) eps: f32,
}

/// The operands of [`rotate_and_store`].
pub(in crate::cpu) struct RotateAndStore<'a> {
    /// `[tokens, (heads + 2 * kv_heads) * head_dim]`.
    pub(in crate::cpu) qkv: &'a mut [f32],
    pub(in crate::cpu) shape: AttentionShape,
    pub(in crate::cpu) norms: Option<Norms<'a>>,
    /// `[tokens, rotated]`.
    pub(in crate::cpu) angles: &'a [f32],
    /// Number of elements of each head that are rotated, from the first on: an even number.
    pub(in crate::cpu) rotated: usize,
    pub(in crate::cpu) kv: &'a mut KvPool,
    pub(in crate::cpu) layer: usize,
}

/// Normalises and rotates q and k, and stores k and v. The caller has checked the step's pages.
pub(in crate::cpu) fn rotate_and_store(
    path: Path,
    pool: &mut ThreadPool,
    step: &Step,
    operands: RotateAndStore<'_>,
) -> Result<(), DeviceError> {
    let RotateAndStore { qkv, shape, norms, angles, rotated, kv, layer } = operands;
    let (layout, scales) = (Layout::new(&kv.shape, layer), kv.scales(layer));
    let of = Layer { qkv, shape, norms, angles, rotated, layout, scales };
    match &mut kv.data {
        KvData::Full(data) => with_format!(data, Fmt, data => of.store::<Fmt>(path, pool, step, data)),
        KvData::Fp8(data) => of.store::<Fp8>(path, pool, step, data),
    }
}

/// The operands of one layer, without its pages.
struct Layer<'a> {
    qkv: &'a mut [f32],
    shape: AttentionShape,
    norms: Option<Norms<'a>>,
    angles: &'a [f32],
    rotated: usize,
    layout: Layout,
    scales: KvScales,
}

impl Layer<'_> {
    fn store<W: KvFormat>(
        self,
        path: Path,
        pool: &mut ThreadPool,
        step: &Step,
        data: &mut [W::Raw],
    ) -> Result<(), DeviceError> {
        let Self { qkv, shape, norms, angles, rotated, layout, scales } = self;
        let width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
        let (qkv, data) = (Shared::new(qkv), Shared::new(data));
        let share = step.tokens().div_ceil(pool.threads()).clamp(SHARE.0, SHARE.1);
        pool.run(step.tokens().div_ceil(share), |task, _| {
            let end = step.tokens().min((task + 1) * share);
            let mut first = task * share;
            let mut row = step.rows.partition_point(|row| row.first_token + row.tokens <= first);
            while first < end {
                let (of, table) = (&step.rows[row], step.block_table(&step.rows[row]));
                let tokens = first..end.min(of.first_token + of.tokens);
                // SAFETY: each token belongs to one task, so no other task accesses these elements of `qkv`.
                let qkv = unsafe { qkv.slice_mut(first * width, tokens.len() * width) };
                let angles = &angles[first * rotated..tokens.end * rotated];
                (first, row) = (tokens.end, row + 1);
                let data = &data;
                path.run(Tokens::<W> {
                    qkv,
                    shape,
                    norms,
                    angles,
                    rotated,
                    data,
                    layout,
                    scales,
                    row: of,
                    table,
                    tokens,
                });
            }
        })
    }
}

/// One task: consecutive tokens of one row.
struct Tokens<'a, W: KvFormat> {
    qkv: &'a mut [f32],
    shape: AttentionShape,
    norms: Option<Norms<'a>>,
    angles: &'a [f32],
    rotated: usize,
    data: &'a Shared<'a, W::Raw>,
    layout: Layout,
    scales: KvScales,
    row: &'a Row,
    table: &'a [PageId],
    tokens: Range<usize>,
}

impl<W: KvFormat> Op for Tokens<'_, W> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        self.rotate(s);
        self.divide(s);
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        let width = (heads + 2 * kv_heads) * head_dim;
        let start = self.row.start + (self.tokens.start - self.row.first_token);
        // The loop over heads is the outer one, since the tokens of one head write to the same cache lines of a panel.
        for head in 0..kv_heads {
            let mut token = 0;
            while token < self.tokens.len() {
                let position = start + token;
                // The values of an even position and the next one share cache lines, so they are stored together.
                let pair = position.is_multiple_of(2) && token + 1 < self.tokens.len();
                let rows = &self.qkv[token * width..(token + 1 + usize::from(pair)) * width];
                token += 1 + usize::from(pair);
                // Nothing is stored in the null page: no request reads it, and several padding rows would write to it
                // at once.
                if self.table[position / self.layout.page_tokens] == PageId::NULL {
                    continue;
                }
                let keys = self.layout.key_panel(self.table, head, position);
                let values = self.layout.value_panels(self.table, head, position);
                assert!(values.max(keys) + LANES * head_dim <= self.data.len());
                let of = |row: usize, head: usize| &rows[row * width + head * head_dim..][..head_dim];
                let slot = position % LANES;
                // SAFETY: only this row writes to the page, as `Step::check_pages` has checked. The row's other tokens,
                // which may be in other tasks, write other elements of the panels. Elements are written through a
                // pointer, so that no two slices overlap.
                unsafe {
                    let (keys, values) = (self.data.as_ptr().add(keys), self.data.as_ptr().add(values));
                    store_key::<W>(keys, slot, of(0, heads + head));
                    let value = of(0, heads + kv_heads + head);
                    if pair {
                        store_key::<W>(keys, slot + 1, of(1, heads + head));
                        store_values::<W>(values, slot, value, of(1, heads + kv_heads + head));
                    } else {
                        store_value::<W>(values, slot, value);
                    }
                }
            }
        }
    }
}

impl<W: KvFormat> Tokens<'_, W> {
    /// Normalises q and k if there are norms, and rotates q and k.
    #[inline(always)]
    fn rotate<S: Simd>(&mut self, s: S) {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        let width = (heads + 2 * kv_heads) * head_dim;
        for (qkv, angles) in self.qkv.chunks_exact_mut(width).zip(self.angles.chunks_exact(self.rotated)) {
            let (q, kv) = qkv.split_at_mut(heads * head_dim);
            let (q_norm, k_norm) = match self.norms {
                Some(Norms { q, k, eps }) => (Some((q, eps)), Some((k, eps))),
                None => (None, None),
            };
            rotate(s, q, head_dim, q_norm, angles);
            rotate(s, &mut kv[..kv_heads * head_dim], head_dim, k_norm, angles);
        }
    }
}

impl<W: KvFormat> Tokens<'_, W> {
    /// Divides k and v by their scales.
    #[inline(always)]
    fn divide<S: Simd>(&mut self, s: S) {
        if self.scales == KvScales::ONE {
            return;
        }
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        for token in self.qkv.chunks_exact_mut((heads + 2 * kv_heads) * head_dim) {
            let (keys, values) = token[heads * head_dim..].split_at_mut(kv_heads * head_dim);
            for (numbers, scale) in [(keys, self.scales.key), (values, self.scales.value)] {
                for numbers in numbers.chunks_mut(LANES) {
                    s.store_some(numbers, s.div(s.load_some(numbers, 0.0), s.splat(scale)));
                }
            }
        }
    }
}

/// Stores a key as lane `slot` of its panel.
///
/// # Safety
///
/// Lane `slot` of the panel is writable, for all elements of the key.
#[inline(always)]
unsafe fn store_key<W: KvFormat>(panel: *mut W::Raw, slot: usize, key: &[f32]) {
    let (even, odd) = (W::index_in_step(0, slot), W::index_in_step(1, slot));
    for (at, key) in key.chunks(NARROW).enumerate() {
        let narrow = narrow::<W>(key);
        for (pair, key) in narrow.chunks_exact(2).enumerate().take(key.len() / 2) {
            let step = panel.wrapping_add((at * NARROW / 2 + pair) * STEP);
            // SAFETY: by the caller's contract, lane `slot` is writable for all elements of the key.
            unsafe {
                if odd == even + 1 {
                    // The two elements are adjacent: one store writes both.
                    std::ptr::copy_nonoverlapping(key.as_ptr(), step.add(even), 2);
                } else {
                    *step.add(even) = key[0];
                    *step.add(odd) = key[1];
                }
            }
        }
    }
}

/// Stores a value as row `slot` of its panels.
///
/// # Safety
///
/// Row `slot` of the panels is writable, for all elements of the value.
#[inline(always)]
unsafe fn store_value<W: KvFormat>(panels: *mut W::Raw, slot: usize, value: &[f32]) {
    for (at, value) in value.chunks(NARROW).enumerate() {
        let narrow = narrow::<W>(value);
        for (panel, value) in narrow.chunks_exact(LANES).enumerate().take(value.len() / LANES) {
            let step = panels.wrapping_add((at * NARROW / LANES + panel) * VALUE_PANEL + slot / 2 * STEP);
            for (lane, &value) in value.iter().enumerate() {
                // SAFETY: by the caller's contract, row `slot` is writable for all elements of the value.
                unsafe { *step.add(W::index_in_step(slot % 2, lane)) = value };
            }
        }
    }
}

/// Stores two values as rows `slot` and `slot + 1`. `slot` is even.
///
/// # Safety
///
/// Both rows of the panels are writable, for all elements of the values.
#[inline(always)]
unsafe fn store_values<W: KvFormat>(panels: *mut W::Raw, slot: usize, even: &[f32], odd: &[f32]) {
    for (at, (even, odd)) in even.chunks(NARROW).zip(odd.chunks(NARROW)).enumerate() {
        let count = even.len() / LANES;
        let (even, odd) = (narrow::<W>(even), narrow::<W>(odd));
        for (panel, (even, odd)) in
            even.chunks_exact(LANES).zip(odd.chunks_exact(LANES)).enumerate().take(count)
        {
            let mut step = [W::narrow(0.0); STEP];
            for lane in 0..LANES {
                step[W::index_in_step(0, lane)] = even[lane];
                step[W::index_in_step(1, lane)] = odd[lane];
            }
            let to = panels.wrapping_add((at * NARROW / LANES + panel) * VALUE_PANEL + slot / 2 * STEP);
            // SAFETY: by the caller's contract, both rows are writable for all elements.
            unsafe { std::ptr::copy_nonoverlapping(step.as_ptr(), to, STEP) };
        }
    }
}

/// Converts up to [`NARROW`] numbers to the pages' format. The fixed length lets the compiler vectorise the loop.
#[inline(always)]
fn narrow<W: KvFormat>(from: &[f32]) -> [W::Raw; NARROW] {
    let mut narrow = [W::narrow(0.0); NARROW];
    for (narrow, &x) in narrow.iter_mut().zip(from) {
        *narrow = W::narrow(x);
    }
    narrow
}

/// Normalises heads if there is a norm. Then rotates the first `angles.len()` elements of each head: element `i`
/// together with element `i + angles.len() / 2`.
#[inline(always)]
fn rotate<S: Simd>(s: S, heads: &mut [f32], head_dim: usize, norm: Option<(&[f32], f32)>, angles: &[f32]) {
    let half = angles.len() / 2;
    let (cos, sin) = angles.split_at(half);
    for heads in heads.chunks_mut(LANES * head_dim) {
        // The factors of several heads are computed first, so that their square roots overlap.
        let mut factors = [1.0; LANES];
        if let Some((_, eps)) = norm {
            for (factor, head) in factors.iter_mut().zip(heads.chunks_exact(head_dim)) {
                *factor = rms_factor(s, head, eps);
            }
        }
        for (&factor, head) in factors.iter().zip(heads.chunks_exact_mut(head_dim)) {
            let (rotated, rest) = head.split_at_mut(2 * half);
            let (low, high) = rotated.split_at_mut(half);
            for at in (0..half).step_by(LANES) {
                let end = half.min(at + LANES);
                let (low, high) = (&mut low[at..end], &mut high[at..end]);
                let (mut a, mut b) = (s.load_some(low, 0.0), s.load_some(high, 0.0));
                if let Some((weight, _)) = norm {
                    let weights = (
                        s.load_some(&weight[at..end], 0.0),
                        s.load_some(&weight[half + at..half + end], 0.0),
                    );
                    a = s.mul(s.mul(a, s.splat(factor)), weights.0);
                    b = s.mul(s.mul(b, s.splat(factor)), weights.1);
                }
                let (cos, sin) = (s.load_some(&cos[at..end], 0.0), s.load_some(&sin[at..end], 0.0));
                s.store_some(low, s.sub(s.mul(a, cos), s.mul(b, sin)));
                s.store_some(high, s.add(s.mul(b, cos), s.mul(a, sin)));
            }
            if let Some((weight, _)) = norm {
                for (rest, weight) in rest.chunks_mut(LANES).zip(weight[2 * half..].chunks(LANES)) {
                    let normal = s.mul(s.load_some(rest, 0.0), s.splat(factor));
                    s.store_some(rest, s.mul(normal, s.load_some(weight, 0.0)));
                }
            }
        }
    }
}
