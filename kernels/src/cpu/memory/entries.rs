//! A paged plane of compressed entries and its layout.
//!
//! All pages of a layer precede those of the next one. A page of a layer holds its entries in order of position, and an
//! entry's elements are adjacent.

use std::ops::Range;

use crate::cpu::memory::format::Stored;
use crate::{DeviceError, EntriesShape, PageId};

/// The name of the pool in errors.
pub(in crate::cpu) const ENTRIES_POOL: &str = "a pool of entries";

/// The pages of a plane of entries, which hold the entries of all layers.
pub(in crate::cpu) struct EntriesPool {
    pub(in crate::cpu) shape: EntriesShape,
    pub(in crate::cpu) data: Stored,
}

impl EntriesPool {
    /// Allocates the pages of a plane.
    pub(in crate::cpu) fn zeroed(shape: EntriesShape) -> Result<Self, DeviceError> {
        let EntriesShape { layers, width, ratio, page_tokens, pages, dtype } = shape;
        if width == 0 || ratio == 0 || page_tokens == 0 || !page_tokens.is_multiple_of(ratio) {
            return Err(DeviceError::Unsupported(format!(
                "entries of {width} elements for each {ratio} tokens of pages of {page_tokens} tokens: whole entries \
                 per page are needed"
            )));
        }
        let elements = [layers, pages, page_tokens / ratio]
            .into_iter()
            .try_fold(width, |product: usize, factor| product.checked_mul(factor));
        Ok(Self { shape, data: Stored::zeroed(dtype, elements, ENTRIES_POOL)? })
    }

    /// The byte ranges of a page, layer by layer.
    pub(in crate::cpu) fn byte_ranges(&self, page: PageId) -> impl Iterator<Item = Range<usize>> + use<> {
        let EntriesShape { layers, pages, .. } = self.shape;
        let bytes = self.shape.page_bytes() / layers.max(1);
        (0..layers).map(move |layer| {
            let start = (layer * pages + page.0 as usize) * bytes;
            start..start + bytes
        })
    }

    /// Number of entries per layer.
    pub(in crate::cpu) fn count(&self) -> usize {
        self.shape.pages * (self.shape.page_tokens / self.shape.ratio)
    }

    /// Checks that the pool has layer `layer`, and entries of `width` elements.
    pub(in crate::cpu) fn check(&self, layer: usize, width: usize) -> Result<(), DeviceError> {
        if layer < self.shape.layers && width == self.shape.width {
            return Ok(());
        }
        Err(DeviceError::Misuse(format!("entries of {width} in layer {layer} of a pool of {:?}", self.shape)))
    }
}

/// Computes the indices, among the pool's elements, of one layer's entries.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct EntryLayout {
    page_entries: usize,
    width: usize,
    layer_start: usize,
}

impl EntryLayout {
    pub(in crate::cpu) fn new(shape: &EntriesShape, layer: usize) -> Self {
        let EntriesShape { width, ratio, page_tokens, pages, .. } = *shape;
        let page_entries = page_tokens / ratio;
        Self { page_entries, width, layer_start: layer * pages * page_entries * width }
    }

    /// The page that holds an entry of a request with this block table.
    pub(in crate::cpu) fn page(&self, table: &[PageId], entry: usize) -> PageId {
        table[entry / self.page_entries]
    }

    /// Range of the elements of an entry of a request with this block table.
    #[inline(always)]
    pub(in crate::cpu) fn entry(&self, table: &[PageId], entry: usize) -> Range<usize> {
        let page = table[entry / self.page_entries].0 as usize;
        let index = page * self.page_entries + entry % self.page_entries;
        let start = self.layer_start + index * self.width;
        start..start + self.width
    }
}
