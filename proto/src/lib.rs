//! The contracts between Tutti's processes, and between Tutti and its clients: generated messages, typed ids and the
//! declaration of a model. This crate depends on no other crate of the workspace except `tutti-parameters`.

mod cache_salt;
pub mod declaration;
mod ids;
mod labels;
mod load;
pub mod probes;
mod request;

pub use cache_salt::CacheSalt;
pub use ids::{Epoch, GraphId, GraphKey, Incarnation, Rank, RequestId, StepNumber, WorkerId};
pub use request::{CheckedRequest, RequestLimits, RequestParts, TokenLimit};

/// `tutti.v1`: the stable API for clients.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod v1 {
    include!("generated/tutti.v1.rs");

    pub use tutti_parameters::AskedSampling as Sampling;

    /// The encoded descriptor set of this package, for gRPC reflection.
    pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("generated/tutti.v1.bin");
}

/// `tutti.cluster.v1`: the protocol between the processes of one cluster.
pub mod cluster {
    /// Version 1 of the protocol, which is the current version.
    #[allow(missing_docs, clippy::all, clippy::pedantic)]
    pub mod v1 {
        include!("generated/tutti.cluster.v1.rs");

        pub use tutti_parameters::{LogitBias, SamplingParams};
    }
}

pub use tutti_parameters::{self as parameters, MAX_LOGPROBS, MAX_PRIORITY};

/// The largest gRPC message that a service sends or accepts, in bytes. A prompt of 4 Mi token ids fits.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;
