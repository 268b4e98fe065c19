//! What may happen inside a step, between two of its parts: pages that no row of the step reads or writes are copied.

use tutti_kernels::{DeviceError, PageId};

/// The pages of a model whose step has paused.
pub trait PausedPages {
    /// As [`Model::read_pages`](crate::Model::read_pages).
    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError>;
    /// As [`Model::write_pages`](crate::Model::write_pages).
    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError>;
}

/// Uses the pauses of a model's steps. It runs on the step's own thread and the step waits for it, so that nothing is
/// ever copied while something is computed.
pub trait StepHook: Send {
    /// Whether anything may come to be done while the next step runs: a device that could pause at any time need not,
    /// where nothing may.
    fn may_have_work(&self) -> bool;
    /// The step has paused. Next to nothing where there is nothing to do. An error ends the step.
    fn run(&mut self, pages: &mut dyn PausedPages) -> Result<(), DeviceError>;
}
