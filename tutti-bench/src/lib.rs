//! A load generator for OpenAI-compatible servers and for Tutti's gRPC API.
//!
//! [`workload`] makes or reads requests, and [`arrivals`] gives each its time. [`run`](mod@run) sends them through a
//! [`client`]. [`statistics`] keeps the measurements in bounded memory, and [`report`] writes them as JSON and HTML.

pub mod arguments;
pub mod arrivals;
pub mod client;
mod error;
pub mod events;
pub mod histogram;
mod html;
pub mod lengths;
pub mod outcome;
mod plot;
pub mod random;
pub mod report;
pub mod run;
pub mod statistics;
mod timeline;
pub mod workload;

pub use error::Error;

/// Version of the generator, and the commit that it was built from.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("TUTTI_BENCH_COMMIT"), ")");
