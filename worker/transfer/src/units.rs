//! Units: the pages, slots and rows of embeddings that move between workers.

use std::sync::Arc;

use tutti_kernels::{PageId, SlotId, collective::GroupRank};
use tutti_proto::{GraphKey, cluster::v1 as pb};

use crate::{FRAME_BYTES, PageLayout};

/// Kind of units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitKind {
    /// Pages of a request's planes in the layout of [`PageLayout`].
    Pages,
    /// The state of a request in all slot planes, in the layout of [`PageLayout`]. This state is one unit, which is
    /// sent after the pages. A model without slot planes has no slot.
    Slot,
    /// Embeddings of a request's media: one row per media token, in little-endian f32.
    Embeddings,
}

impl UnitKind {
    /// Index of the kind in the counts of a message. The slot has its own index, after that of pages or embeddings.
    pub(crate) fn index(self) -> u32 {
        u32::from(self == Self::Slot)
    }
}

/// Part of each unit that a run holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The whole unit, with the shares of all ranks.
    Whole,
    /// The share of one rank. Each rank copies, sends and receives its own share.
    Share,
}

/// Descriptor of consecutive units of a request. It holds neither the units' bytes nor their ids on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The request's graph.
    pub key: GraphKey,
    /// Kind of the units.
    pub kind: UnitKind,
    /// Part of each unit.
    pub extent: Extent,
    /// Index of the first unit within the request. 0 for a slot.
    pub first: usize,
    /// Number of units. 1 for a slot.
    pub count: usize,
}

impl Run {
    /// Returns the message that describes a run and the ids of its units.
    pub fn message(&self, ids: &UnitIds) -> pb::ShareRun {
        let (pages, slot) = match ids {
            UnitIds::Pages(pages) => (pages.iter().map(|page| page.0).collect(), None),
            UnitIds::Slot(slot) => (Vec::new(), Some(slot.0)),
        };
        pb::ShareRun { key: Some(self.key.into()), first: self.first as u32, pages, slot }
    }

    /// Reads a message that [`message`](Self::message) has made.
    pub fn of_message(pb::ShareRun { key, first, pages, slot }: pb::ShareRun) -> (Self, UnitIds) {
        let (kind, count, ids) = match slot {
            Some(slot) => (UnitKind::Slot, 1, UnitIds::Slot(SlotId(slot))),
            None => {
                let pages: Vec<_> = pages.into_iter().map(PageId).collect();
                (UnitKind::Pages, pages.len(), UnitIds::Pages(pages))
            }
        };
        let key = key.unwrap_or_default().into();
        (Self { key, kind, extent: Extent::Share, first: first as usize, count }, ids)
    }
}

/// Ids of a run's units on the device. They are the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnitIds {
    /// Pages.
    Pages(Vec<PageId>),
    /// One slot.
    Slot(SlotId),
}

/// The reserved units of a request, and a record of those that are filled.
#[derive(Clone, Debug)]
pub struct Filled {
    /// True for each page or row that is valid.
    units: Vec<bool>,
    slot: bool,
}

impl Filled {
    /// Creates the record of `count` pages or rows, of which the first `known` are valid already.
    pub fn new(count: usize, known: usize) -> Self {
        Self { units: (0..count).map(|index| index < known).collect(), slot: false }
    }

    /// Number of pages or rows.
    pub fn count(&self) -> usize {
        self.units.len()
    }

    /// Records the units of a run as filled. The run must lie within the reserved units.
    pub fn fill(&mut self, run: &Run) {
        match run.kind {
            UnitKind::Slot => self.slot = true,
            UnitKind::Pages | UnitKind::Embeddings => {
                self.units[run.first..run.first + run.count].fill(true);
            }
        }
    }

    /// Index of the first page or row that is not filled.
    pub fn missing(&self) -> Option<usize> {
        self.units.iter().position(|filled| !filled)
    }

    /// True once the slot is filled.
    pub fn has_slot(&self) -> bool {
        self.slot
    }

    /// True if no unit is missing. The slot counts only if `with_slot` is true.
    pub fn is_complete(&self, with_slot: bool) -> bool {
        self.missing().is_none() && (self.slot || !with_slot)
    }
}

/// The layouts of all units that a worker exchanges with others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Units {
    /// Whole pages and slots.
    pub whole: UnitLayout,
    /// This rank's share of pages and slots. The same as `whole` for a worker without a group.
    pub share: UnitLayout,
    /// Rows of embeddings. In a group, only the leader exchanges them.
    pub embeddings: UnitLayout,
}

impl Units {
    /// The units of a rank. `width` is the number of elements per embedding.
    pub fn new(layout: &PageLayout, group_rank: GroupRank, width: usize) -> Self {
        Self {
            whole: UnitLayout::of_pages(layout, GroupRank::ALONE),
            share: UnitLayout::of_pages(layout, group_rank),
            embeddings: UnitLayout::of_embeddings(width),
        }
    }

    /// Layout of the units of this kind: whole units, or this rank's shares.
    pub fn of(&self, kind: UnitKind, extent: Extent) -> &UnitLayout {
        match (kind, extent) {
            (UnitKind::Embeddings, _) => &self.embeddings,
            (_, Extent::Whole) => &self.whole,
            (_, Extent::Share) => &self.share,
        }
    }

    /// Bytes of the largest unit.
    pub fn largest(&self) -> usize {
        self.whole.largest_unit().max(self.embeddings.largest_unit())
    }
}

/// The kind and the sizes of a transfer's units. The units are either pages or rows of embeddings. In models with slot
/// planes, the slot is sent with the pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitLayout {
    /// Pages or embeddings.
    pub kind: UnitKind,
    /// Hash of the units' layout. A receiver compares it with the sender's hash before it uses the sender's bytes.
    pub id: u64,
    /// Bytes per page, or per row of embeddings.
    pub unit_bytes: usize,
    /// Bytes of the slot; 0 without a slot.
    pub slot_bytes: usize,
    /// The model's planes; empty for embeddings.
    pub planes: Arc<[pb::TransferPlane]>,
    /// The rank whose share of each unit this layout describes; [`GroupRank::ALONE`] for whole units.
    pub share: GroupRank,
}

impl UnitLayout {
    /// Layout of a rank's share of a request's pages and slot. The share of [`GroupRank::ALONE`] is the whole.
    pub fn of_pages(layout: &PageLayout, share: GroupRank) -> Self {
        let plane = |plane: &crate::PlaneLayout| pb::TransferPlane {
            name: plane.name.clone(),
            unit_bytes: plane.unit_bytes() as u64,
        };
        Self {
            kind: UnitKind::Pages,
            id: layout.id(),
            unit_bytes: layout.share_bytes(UnitKind::Pages, share),
            slot_bytes: layout.share_bytes(UnitKind::Slot, share),
            planes: layout.planes.iter().map(plane).collect(),
            share,
        }
    }

    /// Rows of embeddings of `width` elements in f32.
    pub fn of_embeddings(width: usize) -> Self {
        Self {
            kind: UnitKind::Embeddings,
            // The width identifies the layout, because every row is little-endian f32.
            id: width as u64,
            unit_bytes: width * size_of::<f32>(),
            slot_bytes: 0,
            planes: Arc::default(),
            share: GroupRank::ALONE,
        }
    }

    /// True if a rank of this group exchanges shares, instead of whole pages, with a rank of a group of `ranks` ranks.
    pub fn is_shared_with(&self, ranks: usize) -> bool {
        self.is_share() && self.share.world_size == ranks
    }

    /// True if this layout describes shares of units.
    pub fn is_share(&self) -> bool {
        !self.share.is_alone()
    }

    /// Bytes of the largest unit.
    pub fn largest_unit(&self) -> usize {
        self.unit_bytes.max(self.slot_bytes)
    }

    /// Bytes per unit of one kind. The kind must be in this transfer.
    pub fn bytes_of(&self, kind: UnitKind) -> usize {
        match kind {
            UnitKind::Slot => self.slot_bytes,
            UnitKind::Pages | UnitKind::Embeddings => self.unit_bytes,
        }
    }

    /// Maximum number of units of a kind in one message.
    pub fn at_once(&self, kind: UnitKind) -> usize {
        (FRAME_BYTES / self.bytes_of(kind).max(1)).max(1)
    }

    /// Number of units of each kind for `count` pages or rows, in the order of the message field `counts`.
    pub fn counts(&self, count: usize) -> Vec<u32> {
        let mut counts = vec![count as u32];
        counts.extend((self.slot_bytes > 0).then_some(1));
        counts
    }

    /// The kind of units at an index of the message field `counts`. `None` if this transfer has no such units.
    pub fn kind_of(&self, index: u32) -> Option<UnitKind> {
        match index {
            0 => Some(self.kind),
            1 if self.slot_bytes > 0 => Some(UnitKind::Slot),
            _ => None,
        }
    }

    /// Bytes of `count` pages or rows, and of the slot.
    pub fn bytes(&self, count: usize) -> u64 {
        count as u64 * self.unit_bytes as u64 + self.slot_bytes as u64
    }

    /// Offset of a unit in a segment that holds `count` pages or rows. The slot follows the pages.
    pub fn offset_of(&self, kind: UnitKind, first: usize, count: usize) -> u64 {
        let first = if kind == UnitKind::Slot { count } else { first };
        first as u64 * self.unit_bytes as u64
    }

    /// Plural name of the pages or rows, for error messages.
    pub fn name(&self) -> &'static str {
        match self.kind {
            UnitKind::Pages | UnitKind::Slot => "pages",
            UnitKind::Embeddings => "embeddings",
        }
    }

    /// Describes the units of a message, which need not be in this transfer, for error messages.
    pub fn describe(&self, data: &pb::PlaneData) -> String {
        if data.kind > 0 {
            return "the units of the slot".to_owned();
        }
        format!("{} {:?}", self.name(), data.first..data.first.saturating_add(data.count))
    }

    /// Returns the first difference between these planes and a sender's, with the name of the plane.
    pub fn difference(&self, theirs: &[pb::TransferPlane]) -> Option<String> {
        let find = |planes: &[pb::TransferPlane], name: &str| {
            planes.iter().find(|plane| plane.name == name).map(|plane| plane.unit_bytes)
        };
        let ours =
            self.planes.iter().find_map(|pb::TransferPlane { name, unit_bytes }| match find(theirs, name) {
                None => Some(format!("the sender lacks plane {name:?}")),
                Some(bytes) if bytes != *unit_bytes => Some(format!(
                    "plane {name:?} has units of {bytes} bytes at the sender, of {unit_bytes} here"
                )),
                Some(_) => None,
            });
        let unknown = || theirs.iter().find(|plane| find(&self.planes, &plane.name).is_none());
        ours.or_else(|| unknown().map(|plane| format!("there is no plane {:?} here", plane.name)))
    }
}

#[cfg(test)]
mod tests;
