//! Code that every process of Tutti shares: layered config, telemetry, metrics, health, shutdown, the error type, and
//! the files of checkpoints. The crate also has the prefix index, by which routers and conductors place requests.

pub mod announce;
pub mod checkpoint;
pub mod command_line;
pub mod config;
pub mod descriptors;
mod error;
pub mod exit;
pub mod freed_memory;
pub mod gguf;
pub mod grpc_health;
pub mod health;
pub mod listen;
pub mod live;
mod log_queue;
pub mod memory;
pub mod metrics;
pub mod nearest;
pub mod operations;
pub mod output_room;
pub mod prefix_index;
pub mod process;
pub mod process_usage;
pub mod progress;
pub mod reload;
pub mod request_id;
pub mod serve;
pub mod shutdown;
pub mod telemetry;
pub mod tls;
pub mod token;
pub mod trace;
pub mod watched_files;
pub mod worker_view;

pub use error::{CLIENT_LEFT, Error, ErrorKind};

/// The version of this build. All processes of one cluster must have the same version.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
