//! The conductor's view of one request: validation, its worker graphs, and its state machine.
//! Pure: no I/O, no clock, no device.

mod deadline;
mod effects;
mod machine;
pub mod media;
mod plan;
mod run;
mod trace;

pub use deadline::Deadline;
pub use effects::{Dropped, Effects, EndingKind, RowOutcome};
pub use machine::{MAX_MOVES, NewRequest, Origin, Request, ReservedRoom, RoomFor, Waiting};
pub use plan::{GraphRole, TextWalks};
pub use run::Members;
