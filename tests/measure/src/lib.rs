//! What the benches of all crates share: the machine, its limits, statistics, and the JSON of results. It needs no HTTP
//! client; the load generator is `tests/load`.

pub mod limits;
pub mod machine;
pub mod results;
pub mod statistics;
