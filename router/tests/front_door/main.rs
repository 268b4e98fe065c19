//! The whole front door before a conductor made of scripts.

mod bad_input;
mod chat;
mod completions;
mod grpc;
mod life;
mod support;
