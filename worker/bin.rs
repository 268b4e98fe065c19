//! The `worker` binary: a worker that joins a conductor by hand.

use std::process::ExitCode;

fn main() -> ExitCode {
    tutti_worker::by_hand(std::env::args_os())
}
