//! Exit codes, as in sysexits.h. Scripts rely on them.

use std::process::ExitCode;

use crate::{Error, ErrorKind, log_queue};

/// Bad usage, config or checkpoint. A restart without a change fails too.
pub const USAGE: u8 = 64;
/// A fault of Tutti's own.
pub const INTERNAL: u8 = 70;
/// A command could not do what it was asked for.
pub const COMMAND_FAILED: u8 = 1;
/// Bad usage of a command.
pub const COMMAND_USAGE: u8 = 2;

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
            log_queue::last_line(format!("{name}: {error}"));
            ExitCode::from(code(&error))
        }
    }
}

/// Ends the process at once, as soon as its log lines are written.
pub fn after_logs(code: u8) -> ! {
    log_queue::flush();
    std::process::exit(code.into())
}

/// Ends the process at once, with a last line on stderr. If nobody reads there, the line is lost.
pub fn at_once(code: u8, line: String) -> ! {
    log_queue::last_line(line);
    std::process::exit(code.into())
}

/// Runs a command that ends at once and serves nothing: `read` reads its settings, and `act` does what they say. The
/// exit code is that of other such programs: 2 after an error of `read`, 1 after one of `act`.
pub fn command<S>(
    name: &str,
    read: impl FnOnce() -> Result<S, Error>,
    act: impl FnOnce(S) -> Result<(), Error>,
) -> ExitCode {
    let outcome = read()
        .map_err(|error| (error, COMMAND_USAGE))
        .and_then(|settings| act(settings).map_err(|error| (error, COMMAND_FAILED)));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err((error, code)) => {
            log_queue::last_line(format!("{name}: {error}"));
            ExitCode::from(code)
        }
    }
}

/// Returns a parsed command line. Bad usage is reported on stderr and ends the process with `usage`. `--help` and
/// `--version` end it with 0.
pub fn unless_parsed<T>(parsed: Result<T, clap::Error>, usage: u8) -> T {
    parsed.unwrap_or_else(|error| {
        // A write error on stderr cannot be reported.
        let _ = error.print();
        std::process::exit(if error.use_stderr() { usage.into() } else { 0 })
    })
}
