//! Pages on their way between workers: as bytes that do not depend on how many ranks a group has.
//!
//! A page travels as a whole model at TP 1 would hold it. Where ranks hold parts of it, their leader puts the parts
//! together before it is sent, and each rank takes its own part of what arrives; so the groups on both sides may differ.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    ops::Range,
};

use tutti_kernels::collective::GroupRank;

use crate::weights::share;

/// A page as it travels: sections (layers) after each other, in each of them all units (KV heads) in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PageLayout {
    /// Parts of a page that are as large as each other.
    pub sections: usize,
    /// What ranks divide a section into.
    pub units: usize,
    /// Of one unit in one section.
    pub unit_bytes: usize,
    /// Tokens a page.
    pub page_tokens: usize,
    /// What the bytes of a unit mean.
    pub format: String,
}

impl PageLayout {
    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.sections * self.units * self.unit_bytes
    }

    /// What two workers compare before either uses a byte of the other: equal layouts have equal hashes, in every process
    /// of one build.
    pub fn id(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }

    /// The units of a rank; neighbours hold the same one where there are more ranks than units.
    pub(crate) fn units_of(&self, group_rank: GroupRank) -> Range<usize> {
        share(self.units, group_rank)
    }

    /// What a rank with these units holds of pages, section by section.
    pub(crate) fn cut<'a>(&self, pages: &'a [u8], units: Range<usize>) -> impl Iterator<Item = &'a [u8]> {
        let bytes = units.start * self.unit_bytes..units.end * self.unit_bytes;
        pages.chunks_exact(self.units * self.unit_bytes).map(move |section| &section[bytes.clone()])
    }

    /// Puts together what the ranks of a group hold of the same pages, given end to end in the order of ranks.
    pub(crate) fn join(&self, parts: &[u8], ranks: usize, out: &mut Vec<u8>) {
        let section_bytes = self.units * self.unit_bytes;
        let part = |rank| {
            let units = self.units_of(GroupRank { rank, world_size: ranks });
            (units.start * self.unit_bytes, units.len() * self.unit_bytes)
        };
        let (_, part_bytes) = part(0);
        let sections = parts.len() / (ranks * part_bytes).max(1);
        let first = out.len();
        out.resize(first + sections * section_bytes, 0);
        for rank in 0..ranks {
            let (at, bytes) = part(rank);
            let from = parts[rank * sections * bytes..].chunks_exact(bytes);
            for (section, part) in out[first..].chunks_exact_mut(section_bytes).zip(from) {
                section[at..at + bytes].copy_from_slice(part);
            }
        }
    }
}

#[cfg(test)]
mod tests;
