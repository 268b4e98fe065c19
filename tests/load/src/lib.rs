//! An open-loop load generator for OpenAI-compatible servers: requests leave when their time has come, whether or not
//! earlier ones were answered, so a slow server cannot slow its own load down.

pub mod client;
pub mod limits;
pub mod machine;
pub mod plan;
pub mod report;
pub mod results;
pub mod run;
