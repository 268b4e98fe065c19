//! The `router` executable: a front door on its own, before a conductor that runs elsewhere.

use std::process::ExitCode;

fn main() -> ExitCode {
    tutti_runtime::exit::run("router", || tutti_router::process::run(std::env::args_os()))
}
