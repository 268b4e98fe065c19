//! What the conductor knows of a request: the checks at the door, its worker graphs, and its state machine.
//! Pure: no I/O, no clock, no device.

mod deadline;
pub mod door;
mod machine;
mod plan;

pub use deadline::Deadline;
pub use machine::{Dropped, Effects, EndingKind, Placement, Request, RowOutcome};
pub use plan::{GraphPlan, text_walks, worker_graphs};
