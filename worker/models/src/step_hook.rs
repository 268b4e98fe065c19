//! A hook that a step runs between two layers. The hook copies pages and slots that no row of the step reads or writes.

use tutti_kernels::{DeviceError, PageId, SlotId};
use tutti_transfer::UnitIds;

use crate::{GroupShares, Model};

/// Access to a model's pages and slots while its step is paused.
pub trait PausedPages {
    /// Appends the contents of `pages` to `out`: see [`Model::read_pages`](crate::Model::read_pages).
    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError>;
    /// Writes `data` to `pages`: see [`Model::write_pages`](crate::Model::write_pages).
    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError>;
    /// Appends the state of `slot` to `out`: see [`Model::read_slot`](crate::Model::read_slot).
    fn read_slot(&mut self, slot: SlotId, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        let _ = out;
        Err(no_slots(slot))
    }
    /// Writes `data` to `slot`: see [`Model::write_slot`](crate::Model::write_slot).
    fn write_slot(&mut self, slot: SlotId, data: &[u8]) -> Result<(), DeviceError> {
        let _ = data;
        Err(no_slots(slot))
    }
    /// Appends the contents of pages or of a slot to `out`.
    fn read_units(&mut self, ids: &UnitIds, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        match ids {
            UnitIds::Pages(pages) => self.read_pages(pages, out),
            UnitIds::Slot(slot) => self.read_slot(*slot, out),
        }
    }
    /// Writes `data` to pages or to a slot.
    fn write_units(&mut self, ids: &UnitIds, data: &[u8]) -> Result<(), DeviceError> {
        match ids {
            UnitIds::Pages(pages) => self.write_pages(pages, data),
            UnitIds::Slot(slot) => self.write_slot(*slot, data),
        }
    }
    /// Access to the shares of all ranks: see [`Model::group_shares`](crate::Model::group_shares).
    fn group_shares(&mut self) -> Option<&mut dyn GroupShares> {
        None
    }
}

/// A model between two steps.
pub struct IdleModel<'a>(pub &'a mut dyn Model);

impl PausedPages for IdleModel<'_> {
    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.0.read_pages(pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        self.0.write_pages(pages, data)
    }

    fn read_slot(&mut self, slot: SlotId, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.0.read_slot(slot, out)
    }

    fn write_slot(&mut self, slot: SlotId, data: &[u8]) -> Result<(), DeviceError> {
        self.0.write_slot(slot, data)
    }

    fn group_shares(&mut self) -> Option<&mut dyn GroupShares> {
        self.0.group_shares()
    }
}

/// Work that runs in the pauses of a model's steps. It runs on the step's thread, so copies never overlap with
/// computation.
pub trait StepHook: Send {
    /// True if work may arrive while the next step runs. If false, a model may run the step without pauses, to save
    /// time.
    fn may_have_work(&self) -> bool;
    /// Runs the pending work. Returns at once if no work is pending. An error fails the step.
    fn run(&mut self, pages: &mut dyn PausedPages) -> Result<(), DeviceError>;
}

fn no_slots(slot: SlotId) -> DeviceError {
    DeviceError::Misuse(format!("slot {} of a model without slot planes", slot.0))
}
