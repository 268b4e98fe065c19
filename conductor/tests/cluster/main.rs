//! The conductor with workers that a test plays: a real gate, real streams, no engine.

mod bench;
mod requests;
mod workers;
