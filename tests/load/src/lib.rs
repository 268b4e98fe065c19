//! An open-loop load generator for OpenAI-compatible servers: each request leaves at its planned time, even if earlier
//! ones are still unanswered, so a slow server cannot slow its own load down.

pub mod client;
pub mod plan;
pub mod report;
pub mod run;
