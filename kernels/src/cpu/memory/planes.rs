//! All planes of a model.

use std::ops::Range;

use crate::cpu::memory::entries::{ENTRIES_POOL, EntriesPool};
use crate::cpu::memory::kv::KvPool;
use crate::cpu::memory::slots::Slots;
use crate::cpu::threads::ThreadPool;
use crate::{DeviceError, PageId, PlanesShape};

/// The pages and slots of a model.
pub struct Planes {
    pub(in crate::cpu) kv: Option<KvPool>,
    pub(in crate::cpu) entries: Vec<EntriesPool>,
    pub(in crate::cpu) slots: Slots,
}

impl Planes {
    pub(in crate::cpu) fn zeroed(shape: &PlanesShape) -> Result<Self, DeviceError> {
        check_paging(shape)?;
        Ok(Self {
            kv: shape.kv.map(|kv| KvPool::zeroed(kv, &shape.kv_scales)).transpose()?,
            entries: shape
                .entries
                .iter()
                .map(|&entries| EntriesPool::zeroed(entries))
                .collect::<Result<_, _>>()?,
            slots: Slots::zeroed(&shape.slot_bytes, shape.slots)?,
        })
    }

    /// Takes all memory of the planes from the operating system at once.
    pub(in crate::cpu) fn make_resident(&mut self, pool: &mut ThreadPool) -> Result<(), DeviceError> {
        if let Some(kv) = &mut self.kv {
            kv.data.make_resident(pool)?;
        }
        for entries in &mut self.entries {
            entries.data.make_resident(pool, ENTRIES_POOL)?;
        }
        self.slots.make_resident(pool)
    }

    /// The plane of keys and values; an error in a model without one.
    pub(in crate::cpu) fn kv(&self) -> Result<&KvPool, DeviceError> {
        self.kv.as_ref().ok_or_else(no_pages)
    }

    /// The plane of keys and values, for writing; an error in a model without one.
    pub(in crate::cpu) fn kv_mut(&mut self) -> Result<&mut KvPool, DeviceError> {
        self.kv.as_mut().ok_or_else(no_pages)
    }

    /// The plane of entries with this index; an error in a model without it.
    pub(in crate::cpu) fn entries(&self, index: usize) -> Result<&EntriesPool, DeviceError> {
        self.entries.get(index).ok_or_else(|| no_entries(index, self.entries.len()))
    }

    /// The tokens per page and the number of pages, which all paged planes share; `None` in a model without pages.
    pub(in crate::cpu) fn paging(&self) -> Option<(usize, usize)> {
        let kv = self.kv.as_ref().map(|kv| (kv.shape.page_tokens, kv.shape.pages));
        let entries = || self.entries.first().map(|entries| (entries.shape.page_tokens, entries.shape.pages));
        kv.or_else(entries)
    }

    /// Appends the bytes of pages to `out`: page by page, plane by plane with keys and values first, layer by layer.
    pub(in crate::cpu) fn read_pages(&self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.check_pages(pages)?;
        out.reserve(pages.len() * self.page_bytes());
        for &page in pages {
            if let Some(kv) = &self.kv {
                append(kv.data.bytes(), kv.byte_ranges(page), out);
            }
            for entries in &self.entries {
                append(entries.data.bytes(), entries.byte_ranges(page), out);
            }
        }
        Ok(())
    }

    /// Overwrites pages with bytes that [`read_pages`](Self::read_pages) has read from as many pages.
    pub(in crate::cpu) fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        self.check_pages(pages)?;
        let (wanted, got) = (pages.len() * self.page_bytes(), data.len());
        if got != wanted {
            return Err(DeviceError::Misuse(format!("{got} bytes for pages of {wanted}")));
        }
        let mut data = data;
        for &page in pages {
            if let Some(kv) = &mut self.kv {
                let ranges = kv.byte_ranges(page);
                data = overwrite(kv.data.bytes_mut(), ranges, data);
            }
            for entries in &mut self.entries {
                let ranges = entries.byte_ranges(page);
                data = overwrite(entries.data.bytes_mut(), ranges, data);
            }
        }
        Ok(())
    }

    /// Bytes per page, over all paged planes.
    fn page_bytes(&self) -> usize {
        let kv = self.kv.as_ref().map_or(0, |kv| kv.shape.page_bytes());
        kv + self.entries.iter().map(|entries| entries.shape.page_bytes()).sum::<usize>()
    }

    fn check_pages(&self, pages: &[PageId]) -> Result<(), DeviceError> {
        let (_, count) = self.paging().ok_or_else(no_pages)?;
        match pages.iter().find(|page| page.0 as usize >= count) {
            Some(page) => Err(DeviceError::Misuse(format!("page {} of a pool of {count}", page.0))),
            None => Ok(()),
        }
    }
}

/// Checks that all paged planes have the same pages, because a block table names the pages of all of them.
fn check_paging(shape: &PlanesShape) -> Result<(), DeviceError> {
    let kv = shape.kv.iter().map(|kv| (kv.page_tokens, kv.pages));
    let entries = shape.entries.iter().map(|entries| (entries.page_tokens, entries.pages));
    let mut all = kv.chain(entries);
    let Some(first) = all.next() else { return Ok(()) };
    match all.find(|other| *other != first) {
        Some((page_tokens, pages)) => Err(DeviceError::Misuse(format!(
            "planes with {pages} pages of {page_tokens} tokens and with {} pages of {} tokens",
            first.1, first.0
        ))),
        None => Ok(()),
    }
}

/// Appends ranges of `bytes` to `out`.
fn append(bytes: &[u8], ranges: impl Iterator<Item = Range<usize>>, out: &mut Vec<u8>) {
    ranges.for_each(|range| out.extend_from_slice(&bytes[range]));
}

/// Overwrites ranges of `bytes` with the first bytes of `data`, and returns the rest of `data`.
fn overwrite<'a>(
    bytes: &mut [u8],
    ranges: impl Iterator<Item = Range<usize>>,
    mut data: &'a [u8],
) -> &'a [u8] {
    for range in ranges {
        let (own, rest) = data.split_at(range.len());
        bytes[range].copy_from_slice(own);
        data = rest;
    }
    data
}

fn no_pages() -> DeviceError {
    DeviceError::Misuse("pages of planes that have none".to_owned())
}

/// The error for a plane of entries that does not exist.
pub(in crate::cpu) fn no_entries(index: usize, count: usize) -> DeviceError {
    DeviceError::Misuse(format!("plane {index} of {count} planes of entries"))
}
