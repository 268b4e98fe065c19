//! A hook that runs inside a step, between two layers: it copies pages that no row of the step reads or writes.

use tutti_kernels::{DeviceError, PageId};

/// Access to a model's pages while its step is paused.
pub trait PausedPages {
    /// Appends the contents of `pages` to `out`: see [`Model::read_pages`](crate::Model::read_pages).
    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError>;
    /// Writes `data` to `pages`: see [`Model::write_pages`](crate::Model::write_pages).
    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError>;
}

/// Work that runs in the pauses of a model's steps. It runs on the step's own thread and the step waits for it, so
/// copies never overlap with computation.
pub trait StepHook: Send {
    /// True if work may arrive while the next step runs. If false, a model whose pauses cost time may run the step
    /// without pauses.
    fn may_have_work(&self) -> bool;
    /// Runs the pending work; returns at once if there is none. An error fails the step.
    fn run(&mut self, pages: &mut dyn PausedPages) -> Result<(), DeviceError>;
}
