//! The instruction paths on which tests run the CPU device and compare it with others. The parent module imports
//! [`Isa`].

use std::io::Write;
use std::sync::Once;

use super::Isa;

/// Returns all paths that this machine supports. Prints the other paths for each test. The test harness captures this
/// output and shows it only for failed tests, so the first missing path is also written directly to stderr, once.
pub fn testable(test: &str) -> Vec<Isa> {
    static SAID: Once = Once::new();
    for isa in Isa::ALL.into_iter().filter(|isa| !isa.available()) {
        SAID.call_once(|| {
            let line = format!("SKIPPED on {isa} and better: not here. See tests/emulated/run.\n");
            let _ = std::io::stderr().write_all(line.as_bytes());
        });
        eprintln!("{test}: SKIPPED on {isa}: this machine does not have it");
    }
    Isa::supported().collect()
}
