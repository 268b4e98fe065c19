//! The conductor with fake workers: a real worker service, real streams, no engine.
#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test")]

mod bench;
mod control;
mod deaths;
mod disaggregated;
mod groups;
mod parameters;
mod requests;
mod slow;
mod supervision;
mod workers;
