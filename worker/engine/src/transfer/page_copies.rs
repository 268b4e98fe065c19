//! Copies of pages and slots between device and host.

use tutti_kernels::{DeviceError, PageId, SlotId};
use tutti_models::PausedPages;
use tutti_proto::GraphKey;

/// Copies of pages and slots that the device's thread runs between two steps or in a pause of a step.
#[derive(Default)]
pub(crate) struct PageCopies {
    pub(super) reads: Vec<(Pages, Vec<u8>)>,
    pub(super) writes: Vec<(Pages, Vec<u8>)>,
    pub(super) slot_reads: Vec<(Slot, Vec<u8>)>,
    pub(super) slot_writes: Vec<(Slot, Vec<u8>)>,
}

/// A request's slot on the device.
pub(super) struct Slot {
    pub key: GraphKey,
    pub slot: SlotId,
}

/// Consecutive pages of a request on the device.
pub(super) struct Pages {
    pub key: GraphKey,
    pub first: usize,
    pub pages: Vec<PageId>,
}

impl PageCopies {
    pub fn is_empty(&self) -> bool {
        let pages = self.reads.is_empty() && self.writes.is_empty();
        pages && self.slot_reads.is_empty() && self.slot_writes.is_empty()
    }

    /// Bytes that the copies move.
    pub fn bytes(&self) -> usize {
        let pages = self.reads.iter().map(|(_, data)| data.capacity()).sum::<usize>()
            + self.writes.iter().map(|(_, data)| data.len()).sum::<usize>();
        let slots = self.slot_reads.iter().map(|(_, data)| data.capacity()).sum::<usize>()
            + self.slot_writes.iter().map(|(_, data)| data.len()).sum::<usize>();
        pages + slots
    }

    /// Runs the copies. An error ends the worker, because copied and uncopied pages cannot be told apart.
    pub fn run(&mut self, pages: &mut dyn PausedPages) -> Result<(), DeviceError> {
        let failed = |e| DeviceError::Lost(format!("cannot copy pages for another worker: {e}"));
        for (read, data) in &mut self.reads {
            pages.read_pages(&read.pages, data).map_err(failed)?;
        }
        for (written, data) in &self.writes {
            pages.write_pages(&written.pages, data).map_err(failed)?;
        }
        for (read, data) in &mut self.slot_reads {
            pages.read_slot(read.slot, data).map_err(failed)?;
        }
        for (written, data) in &self.slot_writes {
            pages.write_slot(written.slot, data).map_err(failed)?;
        }
        Ok(())
    }
}
