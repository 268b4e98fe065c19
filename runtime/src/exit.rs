//! Exit codes, as in sysexits.h. Scripts rely on them.

use std::process::ExitCode;

use tutti_settings::LogFormat;

use crate::{Error, ErrorKind, log_queue, telemetry::style};

/// Exit code after bad usage, config or checkpoint. A restart without a change fails too.
pub const USAGE: u8 = 64;
/// Exit code after an internal fault of Tutti.
pub const INTERNAL: u8 = 70;
/// Exit code of a command that failed.
pub const COMMAND_FAILED: u8 = 1;
/// Exit code of a command after bad usage.
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

/// Runs a process's `main`. An error is written to stderr as one line in the format of the log, and its kind becomes
/// the exit code.
pub fn run(name: &str, main: impl FnOnce() -> Result<(), Error>) -> ExitCode {
    match main() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log_queue::last_line(style::last_line(name, &error.to_string()));
            ExitCode::from(code(&error))
        }
    }
}

/// Writes the remaining log lines, and then ends the process at once.
pub fn after_logs(code: u8) -> ! {
    log_queue::flush();
    std::process::exit(code.into())
}

/// Ends the process `name` at once, with the reason as a last line on stderr. If nobody reads stderr, the line is lost.
pub fn at_once(code: u8, name: &str, why: &str) -> ! {
    log_queue::last_line(style::last_line(name, why));
    std::process::exit(code.into())
}

/// Runs a command that serves nothing. `read` reads its settings, and `act` executes the command. The exit code is 2
/// after an error of `read`, and 1 after an error of `act`.
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

/// Returns a parsed command line. Bad usage is reported on stderr, in the format of the log, and ends the process
/// `name` with `usage`. `--help` and `--version` end the process with 0.
pub fn unless_parsed<T>(name: &str, parsed: Result<T, clap::Error>, usage: u8) -> T {
    let is_json = usage == USAGE && style::format() == LogFormat::Json;
    parsed.unwrap_or_else(|error| {
        if is_json && error.use_stderr() {
            log_queue::last_line(style::last_line(name, &error.to_string()));
        } else {
            // A write error on stderr cannot be reported.
            let _ = error.print();
        }
        std::process::exit(if error.use_stderr() { usage.into() } else { 0 })
    })
}
