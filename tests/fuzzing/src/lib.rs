//! The targets of the fuzzers, and what is checked of each input.

mod cluster;
mod config;
mod input;
mod media;
mod memory;
mod safetensors;
mod seeds;
mod targets;
mod tool_parser;

use self::memory::Counting;
pub use self::{
    config::remove_files,
    seeds::{Seed, made_seeds},
    targets::Target,
};

#[global_allocator]
static MEMORY: Counting = Counting::new();

/// Further bytes of memory that an input may use, per byte of its length.
const BYTES_PER_BYTE: usize = 256;

/// Runs one input of a target, and panics if the input takes too much memory. Memory is counted over all threads, so no
/// other input may run meanwhile.
pub fn check(target: Target, data: &[u8]) {
    let used = MEMORY.begin();
    target.run(data);
    let peak = MEMORY.peak().saturating_sub(used);
    let limit = target.base_bytes() + data.len() * BYTES_PER_BYTE;
    assert!(peak <= limit, "an input of {} bytes takes {peak} bytes of memory, over {limit}", data.len());
}

/// Libraries whose panics become errors: the template engine, that of constraints, and decoders of sound.
const CAUGHT: [&str; 5] = ["/minijinja-", "/llguidance-", "/derivre-", "/toktrie-", "/symphonia-"];

/// True if a panic is that of a library whose panics the code under test turns into errors. Any other panic is a
/// finding, even if it is caught.
pub fn is_of_a_library(panic: &std::panic::PanicHookInfo<'_>) -> bool {
    panic.location().is_some_and(|at| CAUGHT.iter().any(|library| at.file().contains(library)))
}
