//! A router with several conductors that die, fall silent, refuse requests, and recover.

// clippy.toml allows `unwrap` in tests, but does not recognise the shared helpers as tests.
#![allow(clippy::unwrap_used)]

mod choice;
mod death;
mod faults;
mod start;
mod support;
