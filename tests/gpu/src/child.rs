//! Runs programs of the bundle, within the time limit.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::Bundle;

/// Interval between checks whether a program has ended.
const INTERVAL: Duration = Duration::from_millis(20);
/// Number of last lines of a program's output that a report shows.
const SHOWN_LINES: usize = 30;

/// How a program ended.
pub struct Ended {
    /// True if the program ended before the deadline with exit code 0.
    pub well: bool,
    /// Standard output and standard error of the program.
    pub text: String,
}

impl Ended {
    /// Returns the last lines of the output.
    pub fn tail(&self) -> String {
        let lines: Vec<&str> = self.text.lines().collect();
        lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n")
    }
}

/// Returns a command that runs the program `name` of the bundle, without the caller's `TUTTI_` variables. The program
/// caches compiled kernels in the bundle.
pub fn command(bundle: &Bundle, name: &str) -> Command {
    let mut command = Command::new(bundle.path(name));
    command
        .env("LD_LIBRARY_PATH", &bundle.libraries)
        .env("XDG_CACHE_HOME", bundle.path("cache"))
        .stdin(Stdio::null());
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("TUTTI_")) {
        command.env_remove(name);
    }
    command
}

/// Starts a program that writes its output to `log`.
pub fn start(mut command: Command, log: &Path) -> io::Result<Child> {
    let file = File::create(log)?;
    command.stdout(file.try_clone()?).stderr(file).spawn()
}

/// Runs a program to its end, or kills it at the bundle's deadline. `name` names the log file.
pub fn run(bundle: &Bundle, command: Command, name: &str) -> Ended {
    let log = bundle.path(&format!("{name}.log"));
    let ended = start(command, &log).and_then(|mut child| wait(&mut child, bundle.deadline));
    let text = fs::read(&log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let mut text = text.unwrap_or_default();
    let well = match ended {
        Ok(Some(well)) => well,
        Ok(None) => {
            text.push_str("\nkilled at the time limit");
            false
        }
        Err(error) => {
            text.push_str(&format!("\n{name}: {error}"));
            false
        }
    };
    Ended { well, text }
}

/// Waits for a child. Returns true if the exit code is 0, or `None` if the child was killed at the deadline.
pub fn wait(child: &mut Child, deadline: Instant) -> io::Result<Option<bool>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status.success()));
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(INTERVAL);
    }
}
