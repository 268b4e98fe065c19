//! A router before several conductors that die, fall silent, refuse, and come back.

// clippy.toml allows it in tests; what tests share is one of them too.
#![allow(clippy::unwrap_used)]

mod choice;
mod death;
mod faults;
mod start;
mod support;
