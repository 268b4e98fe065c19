//! The contracts between Tutti's processes, and between Tutti and its clients: generated messages and typed ids.
//! Depends on nothing of ours.

pub mod declaration;
mod ids;

pub use ids::{Epoch, GraphId, GraphKey, Incarnation, Rank, RequestId, StepNumber, WorkerId};

/// `tutti.v1`: what clients speak. Stable.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod v1 {
    tonic::include_proto!("tutti.v1");

    /// The encoded descriptor set of this package, for gRPC reflection.
    pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/tutti.v1.bin"));
}

/// `tutti.cluster.v1`: what the processes of one cluster speak among themselves.
pub mod cluster {
    /// The current version.
    #[allow(missing_docs, clippy::all, clippy::pedantic)]
    pub mod v1 {
        tonic::include_proto!("tutti.cluster.v1");
    }
}

/// The lowest priority of a request is this, the highest its negation: a lower number runs earlier, as in vLLM.
pub const MAX_PRIORITY: i32 = 8;

/// The largest gRPC message any of our services sends or takes, in bytes: a prompt of 4 Mi token ids fits.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;
