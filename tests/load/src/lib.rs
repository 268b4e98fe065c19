//! The client of the benches in `tests/bench`. It keeps a record of each request; `tutti-bench`, the generator for
//! users, keeps only counts. Each request is sent at its planned time, even if earlier ones are still unanswered, so a
//! slow server cannot reduce its own load.

pub mod client;
pub mod plan;
pub mod report;
pub mod run;
