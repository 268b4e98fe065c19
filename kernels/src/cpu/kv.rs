//! The paged KV plane: its layout, and what writes to it.
//!
//! A page of a layer holds, head by head, `page_tokens` keys and then as many values, both in panels (see
//! [`super::format`]). A panel of keys has sixteen tokens as its lanes and runs over the elements of the head, so that
//! scores of sixteen keys are one product; a panel of values has sixteen elements as its lanes and runs over sixteen
//! tokens, so that a weighted sum is one too. Those of sixteen tokens follow each other.

use std::ops::Range;

use super::format::{Format, STEP, Stored, with_format};
use super::isa::Path;
use super::memory::Shared;
use super::pool::ThreadPool;
use super::rowwise::rms_factor;
use super::simd::{LANES, Op, Simd};
use super::step::{Row, Step};
use crate::{AttentionShape, DeviceError, KvShape, PageId};

/// The layout above, by name: what travels between workers is only understood by one that has the same.
pub(super) const FORMAT: &str = "cpu: panels of 16 keys, then panels of 16 values";

/// Elements of a panel of values: sixteen of the head by sixteen tokens.
pub(super) const VALUE_PANEL: usize = LANES * LANES;

/// The pages of a KV plane.
pub struct KvPool {
    pub(super) shape: KvShape,
    pub(super) data: Stored,
}

impl KvPool {
    pub(super) fn zeroed(shape: KvShape) -> Result<Self, DeviceError> {
        if shape.page_tokens == 0 || !shape.page_tokens.is_multiple_of(LANES) {
            return Err(DeviceError::Unsupported(format!(
                "KV pages of {} tokens: a multiple of {LANES} is needed",
                shape.page_tokens
            )));
        }
        check_head_dim(shape.head_dim)?;
        let what = "the KV pool";
        let elements = [2, shape.layers, shape.pages, shape.kv_heads, shape.head_dim]
            .into_iter()
            .try_fold(shape.page_tokens, |product: usize, factor| product.checked_mul(factor))
            .ok_or(DeviceError::OutOfMemory { what, wanted: usize::MAX })?;
        Ok(Self { shape, data: Stored::zeroed(shape.dtype, elements, what)? })
    }

    /// Appends the bytes of pages, of each layer by layer.
    pub(super) fn read_pages(&self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.check_pages(pages)?;
        out.reserve(pages.len() * self.shape.page_bytes());
        let bytes = self.data.bytes();
        for place in self.places(pages) {
            out.extend_from_slice(&bytes[place]);
        }
        Ok(())
    }

    /// Fills pages with what [`read_pages`](Self::read_pages) gave.
    pub(super) fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        self.check_pages(pages)?;
        let (wanted, got) = (pages.len() * self.shape.page_bytes(), data.len());
        if got != wanted {
            return Err(DeviceError::Misuse(format!("{got} bytes for pages of {wanted}")));
        }
        let layer_bytes = self.shape.page_bytes() / self.shape.layers.max(1);
        let places: Vec<Range<usize>> = self.places(pages).collect();
        let bytes = self.data.bytes_mut();
        for (place, data) in places.into_iter().zip(data.chunks_exact(layer_bytes)) {
            bytes[place].copy_from_slice(data);
        }
        Ok(())
    }

    /// Where the bytes of pages are, of each layer by layer.
    fn places(&self, pages: &[PageId]) -> impl Iterator<Item = Range<usize>> {
        let shape = self.shape;
        let (layer_bytes, size) = (shape.page_bytes() / shape.layers.max(1), shape.dtype.bytes());
        let of = move |page: PageId| {
            (0..shape.layers).map(move |layer| {
                let start = Layout::new(&shape, layer).head(page, 0) * size;
                start..start + layer_bytes
            })
        };
        pages.iter().copied().flat_map(of)
    }

    fn check_pages(&self, pages: &[PageId]) -> Result<(), DeviceError> {
        match pages.iter().find(|page| page.0 as usize >= self.shape.pages) {
            Some(page) => {
                Err(DeviceError::Misuse(format!("page {} of a pool of {}", page.0, self.shape.pages)))
            }
            None => Ok(()),
        }
    }

    /// Checks that the pool has the layer, and heads as the layer wants them.
    pub(super) fn check(&self, layer: usize, shape: &AttentionShape) -> Result<(), DeviceError> {
        check_head_dim(shape.head_dim)?;
        let pool = &self.shape;
        let grouped = shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads);
        if layer < pool.layers
            && shape.kv_heads == pool.kv_heads
            && shape.head_dim == pool.head_dim
            && grouped
            && shape.window != Some(0)
        {
            return Ok(());
        }
        Err(DeviceError::Misuse(format!("layer {layer} with {shape:?} over a pool of {pool:?}")))
    }
}

fn check_head_dim(head_dim: usize) -> Result<(), DeviceError> {
    if head_dim > 0 && head_dim.is_multiple_of(LANES) {
        return Ok(());
    }
    Err(DeviceError::Unsupported(format!("heads of {head_dim} elements: a multiple of {LANES} is needed")))
}

/// Where the keys and values of one head in one page begin.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    page_tokens: usize,
    head_dim: usize,
    kv_heads: usize,
    layer_start: usize,
}

impl Layout {
    pub(super) fn new(shape: &KvShape, layer: usize) -> Self {
        let KvShape { kv_heads, head_dim, page_tokens, pages, .. } = *shape;
        let layer_start = layer * pages * kv_heads * 2 * page_tokens * head_dim;
        Self { page_tokens, head_dim, kv_heads, layer_start }
    }

    fn head(&self, page: PageId, head: usize) -> usize {
        self.layer_start + (page.0 as usize * self.kv_heads + head) * 2 * self.page_tokens * self.head_dim
    }

    /// Where the panel of keys begins that holds position `position`.
    #[inline(always)]
    pub(super) fn key_panel(&self, table: &[PageId], head: usize, position: usize) -> usize {
        let page = table[position / self.page_tokens];
        self.head(page, head) + position % self.page_tokens / LANES * LANES * self.head_dim
    }

    /// Where the panels of values begin that hold position `position`, each [`VALUE_PANEL`] elements long.
    #[inline(always)]
    pub(super) fn value_panels(&self, table: &[PageId], head: usize, position: usize) -> usize {
        self.key_panel(table, head, position) + self.page_tokens * self.head_dim
    }
}

/// What normalises the heads of q and k.
#[derive(Clone, Copy)]
pub(super) struct Norms<'a> {
    pub(super) q: &'a [f32],
    pub(super) k: &'a [f32],
    pub(super) eps: f32,
}

/// The operands of [`rotate_and_store`].
pub(super) struct RotateAndStore<'a> {
    /// `[tokens, (heads + 2 * kv_heads) * head_dim]`.
    pub(super) qkv: &'a mut [f32],
    pub(super) shape: AttentionShape,
    pub(super) norms: Option<Norms<'a>>,
    /// `[tokens, head_dim]`.
    pub(super) angles: &'a [f32],
    pub(super) kv: &'a mut KvPool,
    pub(super) layer: usize,
}

/// Normalises and rotates q and k, and stores k and v. The step's pages have been checked.
pub(super) fn rotate_and_store(
    path: Path,
    pool: &mut ThreadPool,
    step: &Step,
    operands: RotateAndStore<'_>,
) -> Result<(), DeviceError> {
    let RotateAndStore { qkv, shape, norms, angles, kv, layer } = operands;
    let layout = Layout::new(&kv.shape, layer);
    let width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
    let qkv = Shared::new(qkv);
    with_format!(&mut kv.data, Fmt, data => {
        let data = Shared::new(data);
        // Tokens in tasks of a few, each by its row; rows own the pages that they write to.
        const SHARE: usize = 8;
        pool.run(step.tokens().div_ceil(SHARE), |task, _| {
            let tokens = task * SHARE..step.tokens().min((task + 1) * SHARE);
            let mut row = step.rows.partition_point(|row| row.first_token + row.tokens <= tokens.start);
            for token in tokens {
                while step.rows[row].first_token + step.rows[row].tokens <= token {
                    row += 1;
                }
                let (row, table) = (&step.rows[row], step.block_table(&step.rows[row]));
                // SAFETY: each token belongs to one task.
                let qkv = unsafe { qkv.part(token * width, width) };
                let angles = &angles[token * shape.head_dim..(token + 1) * shape.head_dim];
                path.run(RotateToken::<Fmt> { qkv, shape, norms, angles, data: &data, layout, row, table, token });
            }
        })
    })
}

/// One token's share.
struct RotateToken<'a, W: Format> {
    qkv: &'a mut [f32],
    shape: AttentionShape,
    norms: Option<Norms<'a>>,
    angles: &'a [f32],
    data: &'a Shared<'a, W::Raw>,
    layout: Layout,
    row: &'a Row,
    table: &'a [PageId],
    token: usize,
}

impl<W: Format> Op for RotateToken<'_, W> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        let position = self.row.start + (self.token - self.row.first_token);
        let (q, kv) = self.qkv.split_at_mut(heads * head_dim);
        let (k, v) = kv.split_at_mut(kv_heads * head_dim);
        for head in q.chunks_exact_mut(head_dim) {
            rotate(s, head, self.norms.map(|norms| (norms.q, norms.eps)), self.angles);
        }
        for head in k.chunks_exact_mut(head_dim) {
            rotate(s, head, self.norms.map(|norms| (norms.k, norms.eps)), self.angles);
        }
        // Nobody reads the null page, and several padded rows would write to it at once.
        if self.table[position / self.layout.page_tokens] == PageId::NULL {
            return;
        }
        for (index, (k, v)) in k.chunks_exact(head_dim).zip(v.chunks_exact(head_dim)).enumerate() {
            let panel = self.layout.key_panel(self.table, index, position);
            let values = self.layout.value_panels(self.table, index, position);
            // SAFETY: slots of this position in a page that this row alone writes to, as `Step::check_pages` found;
            // the row's other tokens, perhaps in other tasks, touch other elements of the panel. Elements are written
            // one by one through a pointer, so that no two slices overlap. In range: the page is one of the pool's.
            unsafe {
                debug_assert!(values + LANES * head_dim <= self.data.len());
                let key = self.data.as_ptr().add(panel);
                for (i, &x) in k.iter().enumerate() {
                    *key.add(i / 2 * STEP + W::place(i % 2, position % LANES)) = W::narrow(x);
                }
                let value = self.data.as_ptr().add(values + position % LANES / 2 * STEP);
                for (i, &x) in v.iter().enumerate() {
                    *value.add(i / LANES * VALUE_PANEL + W::place(position % 2, i % LANES)) = W::narrow(x);
                }
            }
        }
    }
}

/// Normalises one head, where asked, and turns its halves against each other.
#[inline(always)]
fn rotate<S: Simd>(s: S, head: &mut [f32], norm: Option<(&[f32], f32)>, angles: &[f32]) {
    if let Some((weight, eps)) = norm {
        let factor = rms_factor(s, head, eps);
        head.iter_mut().zip(weight).for_each(|(x, weight)| *x = *x * factor * weight);
    }
    let half = head.len() / 2;
    let (cos, sin) = angles.split_at(half);
    let (low, high) = head.split_at_mut(half);
    for i in 0..half {
        let (a, b) = (low[i], high[i]);
        low[i] = a * cos[i] - b * sin[i];
        high[i] = b * cos[i] + a * sin[i];
    }
}
