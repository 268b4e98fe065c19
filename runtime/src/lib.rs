//! What every process of Tutti does alike: layered config, telemetry, metrics, health, shutdown, the error type. And what
//! routers and conductors place requests by alike: who has which prompt prefixes.

pub mod announce;
pub mod checkpoint;
pub mod config;
mod cpu_isa;
mod error;
pub mod exit;
pub mod grpc_health;
pub mod health;
pub mod listen;
pub mod metrics;
pub mod operations;
pub mod prefix_index;
pub mod progress;
pub mod serve;
pub mod shutdown;
pub mod sim;
pub mod telemetry;

pub use cpu_isa::CpuIsa;
pub use error::{Error, ErrorKind};

/// What a Tutti process says it is: the version every process of one cluster must share.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
