//! The contracts between Tutti's processes, and between Tutti and its clients: generated messages, typed ids and the
//! declaration of a model. This crate depends on no other crate of the workspace.

pub mod declaration;
mod ids;
mod labels;

pub use ids::{Epoch, GraphId, GraphKey, Incarnation, Rank, RequestId, StepNumber, WorkerId};

/// `tutti.v1`: the clients' API. Stable.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod v1 {
    include!("generated/tutti.v1.rs");

    /// The encoded descriptor set of this package, for gRPC reflection.
    pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("generated/tutti.v1.bin");
}

/// `tutti.cluster.v1`: the protocol among the processes of one cluster.
pub mod cluster {
    /// The current version.
    #[allow(missing_docs, clippy::all, clippy::pedantic)]
    pub mod v1 {
        include!("generated/tutti.cluster.v1.rs");
    }
}

/// The largest absolute value of a request's priority. Requests with a lower number run earlier, as in vLLM.
pub const MAX_PRIORITY: i32 = 8;

/// Maximum number of most likely tokens whose logprobs a request may ask for at each position.
pub const MAX_LOGPROBS: u32 = 20;

/// Maximum number of stop tokens of a request. Each sampled token is compared with every stop token.
pub const MAX_STOP_TOKENS: usize = 128;

/// The largest gRPC message that a service sends or accepts, in bytes. A prompt of 4 Mi token ids fits.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;
