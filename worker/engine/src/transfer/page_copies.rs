//! Copies of pages between device and host.

use tutti_kernels::{DeviceError, PageId};
use tutti_models::PausedPages;
use tutti_proto::GraphKey;
use tutti_scheduler as scheduler;

/// Page copies that the device's thread runs between two steps or in a pause of a step.
#[derive(Default)]
pub(crate) struct PageCopies {
    pub(super) reads: Vec<(Pages, Vec<u8>)>,
    pub(super) writes: Vec<(Pages, Vec<u8>)>,
}

/// Consecutive pages of a request on the device.
pub(super) struct Pages {
    pub key: GraphKey,
    pub first: usize,
    pub pages: Vec<PageId>,
}

impl PageCopies {
    pub fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.writes.is_empty()
    }

    /// Bytes that the copies move.
    pub fn bytes(&self) -> usize {
        let read = self.reads.iter().map(|(_, data)| data.capacity()).sum::<usize>();
        read + self.writes.iter().map(|(_, data)| data.len()).sum::<usize>()
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
        Ok(())
    }
}

pub(super) fn on_device(pages: &[scheduler::PageId]) -> Vec<PageId> {
    pages.iter().map(|page| PageId(page.0)).collect()
}
