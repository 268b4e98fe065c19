//! The `worker` binary: a worker that joins a conductor by hand.

// A test counts the blocks of glibc's allocator (tests/cluster/lib/live_heap.c).
#[cfg(all(feature = "jemalloc", not(feature = "media-test-model")))]
#[path = "../runtime/executable/allocator.rs"]
mod allocator;

use std::process::ExitCode;

fn main() -> ExitCode {
    tutti_worker::by_hand(std::env::args_os())
}
