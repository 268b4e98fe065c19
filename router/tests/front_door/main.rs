//! The whole front door with a scripted conductor.

// clippy.toml allows `unwrap` in tests, but does not recognise the shared helpers as tests.
#![allow(clippy::unwrap_used)]

mod bad_input;
mod browsers;
mod chat;
mod completions;
mod constraints;
mod grpc;
mod life;
mod limits;
mod media;
mod operators;
mod parameters;
mod readers;
mod request_ids;
mod shares;
mod support;
mod thinking;
mod tool_choice;
mod tools;
