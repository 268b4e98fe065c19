//! The fuzzers: libFuzzer with the target that `FUZZ_TARGET` names. See `tests/fuzz`.
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

/// Memory that any input may take, in bytes.
const BASE_BYTES: usize = 16 << 20;
/// Memory that an input may take per byte, in bytes.
const BYTES_PER_BYTE: usize = 256;

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let target = Target::named(&name);
    let target =
        target.unwrap_or_else(|| panic!("FUZZ_TARGET is {name:?}, but must be one of {}", Target::names()));
    ignore_panics_of_templates();
    // Statics are made before memory is counted.
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

/// Writes the seeds and ends the process, if asked to. Later, libFuzzer takes an exit for a finding.
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
