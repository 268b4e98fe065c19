//! What the conductor knows of a request: the checks at the door, its worker graphs, and its state machine.
//! Pure: no I/O, no clock, no device.

mod deadline;
mod effects;
mod machine;
pub mod media;
mod plan;
mod run;
pub mod validate;

pub use deadline::Deadline;
pub use effects::{Dropped, Effects, EndingKind, RowOutcome};
pub use machine::{Request, Room, RoomFor};
pub use plan::{GraphRole, TextWalks};
pub use run::Members;
