//! Exit codes, as in sysexits.h. Scripts rely on them.

use std::process::ExitCode;

use crate::{Error, ErrorKind};

/// Bad usage, config or checkpoint. A restart without a change fails too.
pub const USAGE: u8 = 64;
/// A fault of Tutti's own.
pub const INTERNAL: u8 = 70;

/// The exit code of a process that ends with this error.
pub fn code(error: &Error) -> u8 {
    match error.kind() {
        ErrorKind::InvalidArgument | ErrorKind::NotFound | ErrorKind::TooLarge | ErrorKind::Unsupported => {
            USAGE
        }
        _ => INTERNAL,
    }
}

/// Runs a process's `main`. An error is written to stderr as one line, and its kind becomes the exit code.
pub fn run(name: &str, main: impl FnOnce() -> Result<(), Error>) -> ExitCode {
    match main() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::from(code(&error))
        }
    }
}

/// Returns a parsed command line. Bad usage is reported on stderr and ends the process with [`USAGE`]. `--help` and
/// `--version` end it with 0.
pub fn unless_parsed<T>(parsed: Result<T, clap::Error>) -> T {
    parsed.unwrap_or_else(|error| {
        // A write error on stderr cannot be reported.
        let _ = error.print();
        std::process::exit(if error.use_stderr() { USAGE.into() } else { 0 })
    })
}
