//! The fuzzers: libFuzzer with the target that `FUZZ_TARGET` names. `tests/fuzz` runs them.
#![no_main]

use std::{fs, panic, path::Path, sync::LazyLock};

use tutti_fuzzing::{Target, check, is_of_a_library, made_seeds};

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let target = Target::named(&name);
    let target =
        target.unwrap_or_else(|| panic!("FUZZ_TARGET is {name:?}, but must be one of {}", Target::names()));
    ignore_panics_of_libraries();
    // A first run initialises all statics, so that their memory is not counted for a later input.
    target.run(&[]);
    target
});

/// Lets panics of libraries that are caught unwind. libFuzzer's own hook ends the process at any other panic.
fn ignore_panics_of_libraries() {
    let end = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        if !is_of_a_library(panic) {
            end(panic);
        }
    }));
}

/// If `FUZZ_WRITE_SEEDS` is set, writes the seeds into one directory per target and ends the process. This happens
/// before libFuzzer starts, because libFuzzer reports an exit as a finding.
fn write_seeds_if_asked() {
    let Ok(directory) = std::env::var("FUZZ_WRITE_SEEDS") else { return };
    for (number, seed) in made_seeds().into_iter().enumerate() {
        let directory = Path::new(&directory).join(seed.target);
        fs::create_dir_all(&directory).expect("a directory");
        fs::write(directory.join(format!("seed-{number}")), seed.input).expect("a file");
    }
    std::process::exit(0);
}

libfuzzer_sys::fuzz_target!(init: write_seeds_if_asked(), |data: &[u8]| check(*TARGET, data));
