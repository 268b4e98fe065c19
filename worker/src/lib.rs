//! The worker process: one per GPU or CPU rank.
//!
//! It dials its conductor (`join`) and holds one stream for its whole life. A thread of its own (`engine_thread`)
//! does all computing, so that a long step never delays a heartbeat, and the stream never delays a step unless the
//! conductor stops reading. `transfer` moves requests that one worker prefills and another decodes. [`lifeline`] ties
//! a spawned worker to its conductor.

mod engine_thread;
mod group;
pub mod isa;
mod join;
pub mod lifeline;
mod loading;
mod packed;
mod process;
mod step_trace;
mod transfer;

pub use process::{by_hand, spawned};
