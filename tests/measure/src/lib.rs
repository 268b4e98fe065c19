//! Helpers of all benches: the machine, its limits, statistics, and the JSON of results. This crate needs no HTTP
//! client; the load generator is `tests/load`.

pub mod limits;
pub mod machine;
pub mod results;
pub mod statistics;
