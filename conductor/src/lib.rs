//! Routes requests to workers; owns their life, and every request's state.
//!
//! [`cluster`] is the heart: requests and workers behind one lock, moved by events. [`request`] holds the pure parts:
//! the door, the worker graphs, the state machine. [`gate`] is where workers join, [`service`] where routers submit,
//! [`supervise`] spawns worker processes and starts them again. The executable composes them with a router.

mod backend;
pub mod cluster;
pub mod config;
pub mod listen;
pub mod mailbox;
mod metrics;
mod private_directory;
pub mod request;
pub mod service;
mod submission;
pub mod supervise;
pub mod worker_service;

pub use backend::{Backend, BackendOptions, random_token};
pub use submission::Submission;
