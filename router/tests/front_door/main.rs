//! The whole front door before a conductor made of scripts.

// clippy.toml allows it in tests; what tests share is one of them too.
#![allow(clippy::unwrap_used)]

mod bad_input;
mod chat;
mod completions;
mod grpc;
mod life;
mod support;
