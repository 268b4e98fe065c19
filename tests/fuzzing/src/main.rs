//! The fuzzers: libFuzzer with the target that `FUZZ_TARGET` names. `tests/fuzz` runs them.
#![no_main]

mod cluster;
mod config;
mod input;
mod memory;
mod safetensors;
mod seeds;
mod targets;

use std::{panic, sync::LazyLock};

use self::{memory::Counting, targets::Target};

#[global_allocator]
static MEMORY: Counting = Counting::new();

/// Memory that an input of any length may use, in bytes.
const BASE_BYTES: usize = 16 << 20;
/// Further bytes of memory that an input may use, per byte of its length.
const BYTES_PER_BYTE: usize = 256;

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let target = Target::named(&name);
    let target =
        target.unwrap_or_else(|| panic!("FUZZ_TARGET is {name:?}, but must be one of {}", Target::names()));
    ignore_panics_of_templates();
    // A first run initialises all statics, so that their memory is not counted for a later input.
    target.run(&[]);
    target
});

/// Lets panics of the template engine unwind, because the router turns them into errors. libFuzzer's own hook ends the
/// process at any other panic.
fn ignore_panics_of_templates() {
    let end = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        if !panic.location().is_some_and(|at| at.file().contains("/minijinja-")) {
            end(panic);
        }
    }));
}

/// If `FUZZ_WRITE_SEEDS` is set, writes the seeds and ends the process. This happens before libFuzzer starts, because
/// libFuzzer reports an exit as a finding.
fn write_seeds_if_asked() {
    if let Ok(directory) = std::env::var("FUZZ_WRITE_SEEDS") {
        seeds::write(directory.as_ref());
        std::process::exit(0);
    }
}

libfuzzer_sys::fuzz_target!(init: write_seeds_if_asked(), |data: &[u8]| {
    let target = &*TARGET;
    let used = MEMORY.begin();
    target.run(data);
    let peak = MEMORY.peak().saturating_sub(used);
    let limit = BASE_BYTES + data.len() * BYTES_PER_BYTE;
    assert!(peak <= limit, "an input of {} bytes takes {peak} bytes of memory, over {limit}", data.len());
});
