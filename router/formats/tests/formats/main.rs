//! All formats: what they make of outputs, of any pieces of them, and of bad ones.

// clippy.toml allows `unwrap` in tests, but does not recognise the shared helpers as tests.
#![allow(clippy::unwrap_used)]

mod cases;
mod example;
mod grammars;
mod hostile;
mod malformed;
mod names;
mod samples;
mod splits;
mod support;
