//! The paged KV plane and its layout.
//!
//! A page of a layer holds, for each head, `page_tokens` keys and then `page_tokens` values, both in panels (see
//! [`super::format`]). The lanes of a panel of keys are sixteen tokens and its inputs are the elements of the head, so
//! that the scores of sixteen keys are one matrix product. The lanes of a panel of values are sixteen elements of the
//! head and its inputs are sixteen tokens, so that a weighted sum is one matrix product, too. The panels that hold the
//! values of the same sixteen tokens are adjacent.

use std::ops::Range;

use crate::cpu::memory::format::Stored;
use crate::cpu::simd::LANES;
use crate::{AttentionShape, DeviceError, KvShape, PageId};

/// The name of the layout that this module documents. Workers exchange pages only if their layouts have the same name.
pub(in crate::cpu) const FORMAT: &str = "cpu: panels of 16 keys, then panels of 16 values";

/// The name of the pool in errors.
pub(in crate::cpu) const KV_POOL: &str = "the KV pool";

/// Number of elements per panel of values: sixteen elements of the head by sixteen tokens.
pub(in crate::cpu) const VALUE_PANEL: usize = LANES * LANES;

/// The pages of a KV plane, which hold keys and values of all layers.
pub(in crate::cpu) struct KvPool {
    pub(in crate::cpu) shape: KvShape,
    pub(in crate::cpu) data: Stored,
}

impl KvPool {
    pub(in crate::cpu) fn zeroed(shape: KvShape) -> Result<Self, DeviceError> {
        if shape.page_tokens == 0 || !shape.page_tokens.is_multiple_of(LANES) {
            return Err(DeviceError::Unsupported(format!(
                "KV pages of {} tokens: a multiple of {LANES} is needed",
                shape.page_tokens
            )));
        }
        check_head_dim(shape.head_dim)?;
        let elements = [2, shape.layers, shape.pages, shape.kv_heads, shape.head_dim]
            .into_iter()
            .try_fold(shape.page_tokens, |product: usize, factor| product.checked_mul(factor));
        Ok(Self { shape, data: Stored::zeroed(shape.dtype, elements, KV_POOL)? })
    }

    /// Appends the bytes of pages to `out`, page by page and layer by layer.
    pub(in crate::cpu) fn read_pages(&self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.check_pages(pages)?;
        out.reserve(pages.len() * self.shape.page_bytes());
        let bytes = self.data.bytes();
        for range in self.byte_ranges(pages) {
            out.extend_from_slice(&bytes[range]);
        }
        Ok(())
    }

    /// Overwrites pages with bytes that [`read_pages`](Self::read_pages) has read from as many pages.
    pub(in crate::cpu) fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        self.check_pages(pages)?;
        let (wanted, got) = (pages.len() * self.shape.page_bytes(), data.len());
        if got != wanted {
            return Err(DeviceError::Misuse(format!("{got} bytes for pages of {wanted}")));
        }
        let layer_bytes = self.shape.page_bytes() / self.shape.layers.max(1);
        let byte_ranges: Vec<Range<usize>> = self.byte_ranges(pages).collect();
        let bytes = self.data.bytes_mut();
        for (range, data) in byte_ranges.into_iter().zip(data.chunks_exact(layer_bytes)) {
            bytes[range].copy_from_slice(data);
        }
        Ok(())
    }

    /// The byte ranges of pages, page by page and layer by layer.
    fn byte_ranges(&self, pages: &[PageId]) -> impl Iterator<Item = Range<usize>> {
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

    /// Checks that the pool has layer `layer`, and that the pool's heads match `shape`.
    pub(in crate::cpu) fn check(&self, layer: usize, shape: &AttentionShape) -> Result<(), DeviceError> {
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

/// Computes the indices, among the pool's elements, of one layer's keys and values.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Layout {
    pub(in crate::cpu) page_tokens: usize,
    head_dim: usize,
    kv_heads: usize,
    layer_start: usize,
}

impl Layout {
    pub(in crate::cpu) fn new(shape: &KvShape, layer: usize) -> Self {
        let KvShape { kv_heads, head_dim, page_tokens, pages, .. } = *shape;
        let layer_start = layer * pages * kv_heads * 2 * page_tokens * head_dim;
        Self { page_tokens, head_dim, kv_heads, layer_start }
    }

    /// Index of the first element of a head in a page.
    fn head(&self, page: PageId, head: usize) -> usize {
        self.layer_start + (page.0 as usize * self.kv_heads + head) * 2 * self.page_tokens * self.head_dim
    }

    /// Index of the first element of the panel of keys that holds token position `position`.
    #[inline(always)]
    pub(in crate::cpu) fn key_panel(&self, table: &[PageId], head: usize, position: usize) -> usize {
        let page = table[position / self.page_tokens];
        self.head(page, head) + position % self.page_tokens / LANES * LANES * self.head_dim
    }

    /// Index of the first element of the panels of values that hold token position `position`. Each panel is
    /// [`VALUE_PANEL`] elements long.
    #[inline(always)]
    pub(in crate::cpu) fn value_panels(&self, table: &[PageId], head: usize, position: usize) -> usize {
        self.key_panel(table, head, position) + self.page_tokens * self.head_dim
    }
}
