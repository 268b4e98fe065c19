//! The worker process: one per GPU or CPU rank.
//!
//! It dials its conductor ([`join`]) and holds one stream for its whole life. Everything that computes runs on one
//! thread of its own ([`engine_thread`]), so that a long step never delays a heartbeat, and the stream never delays a
//! step unless the conductor stops reading. Requests that one worker prefills and another decodes are handed over by
//! [`transfer`]. A worker that the conductor has spawned is tied to it by its [`lifeline`].

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
