//! The units of one transfer: their kinds, sizes and numbers.

use std::sync::Arc;

use tutti_engine::{Cargo, EngineHandle};
use tutti_kernels::collective::GroupRank;
use tutti_models::{LayoutPart, PageLayout};
use tutti_proto::cluster::v1 as pb;

use super::FRAME_BYTES;

/// The kind and the sizes of a transfer's units. The units are either rows of embeddings or pages. In models with slot
/// planes, the slot is sent with the pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Freight {
    /// Pages or embeddings.
    pub cargo: Cargo,
    /// Hash of the units' layout. A receiver compares it with the sender's hash before it uses the sender's bytes.
    pub layout_id: u64,
    /// Bytes per page, or per row of embeddings.
    pub unit_bytes: usize,
    /// Bytes of the slot; 0 without a slot.
    pub slot_bytes: usize,
    /// The model's planes; empty for embeddings.
    pub planes: Arc<[pb::TransferPlane]>,
    /// The rank whose share of each unit this is; [`GroupRank::ALONE`] for whole units.
    pub share: GroupRank,
}

impl Freight {
    /// The pages and the slot of a request of this engine's model.
    pub fn of_planes(engine: &EngineHandle) -> Self {
        Self::of_layout(engine.page_layout())
    }

    pub fn of_layout(layout: &PageLayout) -> Self {
        let plane = |plane: &tutti_models::PlaneLayout| pb::TransferPlane {
            name: plane.name.clone(),
            unit_bytes: plane.unit_bytes() as u64,
        };
        Self {
            cargo: Cargo::Pages,
            layout_id: layout.id(),
            unit_bytes: layout.page_bytes(),
            slot_bytes: layout.slot_bytes(),
            planes: layout.planes.iter().map(plane).collect(),
            share: GroupRank::ALONE,
        }
    }

    /// A rank's share of the pages and the slot.
    pub fn of_share(layout: &PageLayout, share: GroupRank) -> Self {
        Self {
            unit_bytes: layout.share_bytes(LayoutPart::Pages, share),
            slot_bytes: layout.share_bytes(LayoutPart::Slots, share),
            share,
            ..Self::of_layout(layout)
        }
    }

    /// Rows of embeddings of `width` elements in f32.
    pub fn of_embeddings(width: usize) -> Self {
        Self {
            cargo: Cargo::Embeddings,
            // The width is the layout: a row is little-endian f32.
            layout_id: width as u64,
            unit_bytes: width * size_of::<f32>(),
            slot_bytes: 0,
            planes: Arc::default(),
            share: GroupRank::ALONE,
        }
    }

    /// True if these are shares of units.
    pub fn is_share(&self) -> bool {
        !self.share.is_alone()
    }

    /// Bytes of the largest unit.
    pub fn largest_unit(&self) -> usize {
        self.unit_bytes.max(self.slot_bytes)
    }

    /// Bytes per unit of a cargo of this transfer.
    pub fn bytes_of(&self, cargo: Cargo) -> usize {
        match cargo {
            Cargo::Slot => self.slot_bytes,
            Cargo::Pages | Cargo::Embeddings => self.unit_bytes,
        }
    }

    /// Maximum number of units of a cargo per message.
    pub fn at_once(&self, cargo: Cargo) -> usize {
        (FRAME_BYTES / self.bytes_of(cargo).max(1)).max(1)
    }

    /// Number of units of each cargo, as messages state them, if there are `count` pages or rows.
    pub fn counts(&self, count: usize) -> Vec<u32> {
        let mut counts = vec![count as u32];
        counts.extend((self.slot_bytes > 0).then_some(1));
        counts
    }

    /// Index of a cargo in `counts`.
    pub fn index_of(cargo: Cargo) -> u32 {
        u32::from(cargo == Cargo::Slot)
    }

    /// The cargo of an index in `counts`. `None` if this transfer has no such cargo.
    pub fn cargo_of(&self, index: u32) -> Option<Cargo> {
        match index {
            0 => Some(self.cargo),
            1 if self.slot_bytes > 0 => Some(Cargo::Slot),
            _ => None,
        }
    }

    /// Bytes of all units.
    pub fn bytes(&self, count: usize) -> u64 {
        count as u64 * self.unit_bytes as u64 + self.slot_bytes as u64
    }

    /// Offset in a segment of a unit of a cargo, if there are `count` pages or rows. The slot follows them.
    pub fn offset_of(&self, cargo: Cargo, first: usize, count: usize) -> u64 {
        let first = if cargo == Cargo::Slot { count } else { first };
        first as u64 * self.unit_bytes as u64
    }

    /// Plural name of the pages or rows, for error messages.
    pub fn name(&self) -> &'static str {
        match self.cargo {
            Cargo::Pages | Cargo::Slot => "pages",
            Cargo::Embeddings => "embeddings",
        }
    }

    /// Returns the first difference between these planes and a sender's, which names the plane.
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
