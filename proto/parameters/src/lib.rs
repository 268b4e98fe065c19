//! Every parameter of a request, declared once: its name, routes, kind, range and default, and whether it is honoured,
//! refused or ignored.
//!
//! - [`all`] and [`at`] return the declaration. The router uses it to read HTTP bodies, and the tables of `docs/api.md`
//!   are made from it.
//! - The ranges are constants, such as [`PRIORITY`]. The router, the conductor and the worker share the check of each
//!   range. A refusal names the parameter, the value and the range.
//! - [`SamplingParams`] is the message that the router completes, the cluster's protocol carries, and a device's
//!   sampler reads. This crate has few dependencies, so that devices need not depend on gRPC.

mod page;
mod range;
mod sampling;
mod table;

pub use page::{page, update};
pub use range::{Bounded, Count, Integers, Numbers, Refused, check_token_ids};
pub use sampling::{BIAS, BIASES, NUMBERS, SamplingNumber, TOP_K};
pub use table::{
    Absent, CACHE_SALT, DEFAULT_MAX_TOKENS, Kind, LOGPROBS, MAX_LOGPROBS, MAX_PRIORITY, MIN_TOKENS, N,
    PRIORITY, PROMPT_LOGPROBS, Parameter, STOP_BYTES, STOP_TOKEN_IDS, STOPS, Scope, Standing, TOP_LOGPROBS,
    all, at,
};

pub use asked::Sampling as AskedSampling;
pub use complete::{LogitBias, SamplingParams};

/// Messages of `tutti.v1`.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
mod asked {
    include!("generated/tutti.v1.rs");
}

/// Messages of `tutti.cluster.v1`.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
mod complete {
    include!("generated/tutti.cluster.v1.rs");
}
