//! Pages and slots as bytes on the wire, independent of the number of ranks in a group.
//!
//! On the wire a page or a slot has the same bytes as in a group of one rank. The leader of a larger group joins the
//! ranks' shares before it sends them, and cuts the data that arrives into the ranks' shares. The sending and the
//! receiving group may thus differ in size. Groups of the same size neither join nor cut: each rank sends its own
//! [share](crate::Extent::Share).

use std::ops::Range;

use tutti_kernels::collective::{GroupRank, share};

use crate::UnitKind;

/// A part of a plane whose units the ranks of a group divide among themselves, such as the KV heads of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section {
    /// Number of units. If there are more ranks than units, several neighbouring ranks hold the same unit.
    pub units: usize,
    /// Bytes per unit, for one page of a paged plane or one slot of a slot plane.
    pub unit_bytes: usize,
}

/// The storage in which a plane keeps a request's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneStorage {
    /// Pages, with one entry per `ratio` tokens.
    Pages {
        /// Tokens per entry.
        ratio: usize,
    },
    /// One slot.
    Slot,
}

/// The layout of one plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaneLayout {
    /// The plane's name, as in the model's declaration.
    pub name: String,
    /// The storage of the plane's state.
    pub storage: PlaneStorage,
    /// The sections (layers) in order. Sections may have different units.
    pub sections: Vec<Section>,
    /// Name of the format of a unit's bytes.
    pub format: String,
}

impl PlaneLayout {
    /// Bytes per page or per slot of this plane.
    pub fn unit_bytes(&self) -> usize {
        self.sections.iter().map(|section| section.units * section.unit_bytes).sum()
    }
}

/// The layout of a request's planes on the wire. A page holds the sections of all paged planes, plane after plane, and
/// each section holds all its units in order. A slot holds the sections of all slot planes in the same way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageLayout {
    /// Tokens per page, the same for all paged planes. 0 without paged planes.
    pub page_tokens: usize,
    /// The planes, in the order of the model's declaration.
    pub planes: Vec<PlaneLayout>,
}

impl PageLayout {
    /// Bytes per page, over all paged planes.
    pub fn page_bytes(&self) -> usize {
        self.bytes(UnitKind::Pages)
    }

    /// Bytes per slot, over all slot planes. 0 without slot planes.
    pub fn slot_bytes(&self) -> usize {
        self.bytes(UnitKind::Slot)
    }

    /// Names of the slot planes.
    pub fn slot_planes(&self) -> impl Iterator<Item = &str> {
        self.planes.iter().filter(|plane| plane.is_in(UnitKind::Slot)).map(|plane| &*plane.name)
    }

    /// Bytes of one page or one slot.
    pub fn bytes(&self, kind: UnitKind) -> usize {
        self.planes.iter().filter(|plane| plane.is_in(kind)).map(PlaneLayout::unit_bytes).sum()
    }

    /// Bytes of a rank's share of one page or one slot.
    pub fn share_bytes(&self, kind: UnitKind, group_rank: GroupRank) -> usize {
        self.sections(kind).map(|section| section.extent_of(group_rank).len()).sum()
    }

    /// Returns a hash of the layout: FNV-1a over all its fields, the same in every build and on every machine. Two
    /// workers compare their hashes before either uses the other's bytes.
    pub fn id(&self) -> u64 {
        let mut hash = Fnv1a::new();
        hash.number(self.page_tokens);
        hash.number(self.planes.len());
        for PlaneLayout { name, storage, sections, format } in &self.planes {
            hash.text(name);
            hash.number(match storage {
                PlaneStorage::Pages { ratio } => *ratio,
                // 0 marks a slot, because no ratio is 0.
                PlaneStorage::Slot => 0,
            });
            hash.number(sections.len());
            for Section { units, unit_bytes } in sections {
                hash.number(*units);
                hash.number(*unit_bytes);
            }
            hash.text(format);
        }
        hash.0
    }

    /// Cuts a rank's share from whole pages or slots, and appends it to `out`. `whole` holds any number of pages or
    /// slots, end to end.
    pub fn cut(&self, kind: UnitKind, whole: &[u8], group_rank: GroupRank, out: &mut Vec<u8>) {
        let bytes = self.bytes(kind).max(1);
        for one in whole.chunks_exact(bytes) {
            let mut rest = one;
            for section in self.sections(kind) {
                let (units, after) = rest.split_at(section.bytes());
                out.extend_from_slice(&units[section.extent_of(group_rank)]);
                rest = after;
            }
        }
    }

    /// Joins the ranks' shares of the same pages or slots into whole pages or slots, and appends them to `out`.
    /// `shares` holds the shares end to end, in order of rank. Does nothing if the length of `shares` is not a multiple
    /// of all shares of one page or slot.
    pub fn join(&self, kind: UnitKind, shares: &[u8], ranks: usize, out: &mut Vec<u8>) {
        let rank_of = |rank| GroupRank { rank, world_size: ranks };
        let share_bytes: Vec<usize> = (0..ranks).map(|rank| self.share_bytes(kind, rank_of(rank))).collect();
        let (whole_bytes, all) = (self.bytes(kind), share_bytes.iter().sum::<usize>());
        let count = shares.len().checked_div(all).unwrap_or(0);
        let start = out.len();
        out.resize(start + count * whole_bytes, 0);
        let mut rest = shares;
        for (rank, bytes) in share_bytes.into_iter().enumerate() {
            let (share, after) = rest.split_at(count * bytes);
            let (mut at, mut from) = (start, share);
            for section in (0..count).flat_map(|_| self.sections(kind)) {
                let extent = section.extent_of(rank_of(rank));
                let (units, left) = from.split_at(extent.len());
                out[at + extent.start..at + extent.end].copy_from_slice(units);
                (at, from) = (at + section.bytes(), left);
            }
            rest = after;
        }
    }

    fn sections(&self, kind: UnitKind) -> impl Iterator<Item = &Section> {
        self.planes.iter().filter(move |plane| plane.is_in(kind)).flat_map(|plane| &plane.sections)
    }
}

impl PlaneLayout {
    fn is_in(&self, kind: UnitKind) -> bool {
        matches!(
            (self.storage, kind),
            (PlaneStorage::Pages { .. }, UnitKind::Pages) | (PlaneStorage::Slot, UnitKind::Slot)
        )
    }
}

impl Section {
    fn bytes(&self) -> usize {
        self.units * self.unit_bytes
    }

    /// Returns the range of the section's bytes that a rank holds.
    fn extent_of(&self, group_rank: GroupRank) -> Range<usize> {
        if self.units == 0 {
            return 0..0;
        }
        let units = share(self.units, group_rank);
        units.start * self.unit_bytes..units.end * self.unit_bytes
    }
}

/// The hash function FNV-1a with 64 bits.
struct Fnv1a(u64);

impl Fnv1a {
    fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn bytes(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    fn number(&mut self, number: usize) {
        self.bytes(&(number as u64).to_le_bytes());
    }

    /// Adds a text with its length, so that the texts `ab`, `c` and `a`, `bc` differ.
    fn text(&mut self, text: &str) {
        self.number(text.len());
        self.bytes(text.as_bytes());
    }
}

#[cfg(test)]
mod tests;
