//! Routes requests to workers, supervises the workers, and owns every request's state.
//!
//! [`cluster`] keeps all requests and workers behind one lock. Events change their states. [`request`] has the pure
//! parts: validation, worker graphs, the state machine. Workers join at [`worker_service`], routers submit at
//! [`service`], and [`supervise`] spawns worker processes and restarts them. [`state_directory`] passes them on to the
//! next conductor. The executable composes these modules with a router.

mod backend;
pub mod cluster;
pub mod commands;
pub mod config;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod listen;
pub mod mailbox;
mod metrics;
mod private_directory;
pub mod request;
pub mod running;
pub mod service;
pub mod state_directory;
mod submission;
pub mod supervise;
pub mod worker_service;

pub use backend::{Backend, BackendOptions, Outliving, random_token};
pub use submission::Submission;
