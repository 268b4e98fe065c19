//! The worker process: one per GPU or CPU rank.
//!
//! The process dials its conductor (`join`) and keeps one stream for as long as both live. A separate thread
//! (`engine_thread`) does all computing. A long step therefore never delays a heartbeat, and the stream delays a step
//! only if the conductor stops reading. [`tutti_transfer`] moves the data of requests that are divided between workers,
//! for example if one worker prefills and another decodes. [`lifeline`] ties a spawned worker to its conductor, or
//! `outlive` passes it on from a conductor that has died to the next one.

mod device;
mod device_memory;
mod engine_thread;
pub mod fit;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod group;
pub mod isa;
mod join;
pub mod kernels;
pub mod lifeline;
mod live_graphs;
mod loading;
mod outlive;
mod packed;
mod process;
pub mod quantize;
mod request_traces;
mod step_trace;
mod vocabulary;

pub use process::{by_hand, spawned};
