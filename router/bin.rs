//! The `router` executable: a stand-alone front door to conductors that run elsewhere.

use std::process::ExitCode;

fn main() -> ExitCode {
    tutti_runtime::exit::run("router", || tutti_router::process::run(std::env::args_os()))
}
