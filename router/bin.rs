//! The `router` executable: a stand-alone front door to conductors that run elsewhere.

#[cfg(feature = "jemalloc")]
#[path = "../runtime/executable/allocator.rs"]
mod allocator;

use std::process::ExitCode;

fn main() -> ExitCode {
    tutti_runtime::exit::run("router", || tutti_router::process::run(std::env::args_os()))
}
