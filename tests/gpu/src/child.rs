//! Programs of the bundle, with the time that is left.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::Bundle;

/// Interval at which a program is asked for its end.
const INTERVAL: Duration = Duration::from_millis(20);
/// Lines of a program's output that a report shows.
const SHOWN_LINES: usize = 30;

/// The end of a program.
pub struct Ended {
    /// True if it ended in time, with 0.
    pub well: bool,
    /// Its output and errors.
    pub text: String,
}

impl Ended {
    /// The last lines of the output.
    pub fn tail(&self) -> String {
        let lines: Vec<&str> = self.text.lines().collect();
        lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n")
    }
}

/// The program `name` of the bundle, without the caller's settings of Tutti. Compiled kernels are kept in the bundle.
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

/// Starts a program whose output goes to `log`.
pub fn start(mut command: Command, log: &Path) -> io::Result<Child> {
    let file = File::create(log)?;
    command.stdout(file.try_clone()?).stderr(file).spawn()
}

/// Runs a program to its end or to the bundle's deadline, at which it is killed. `name` names its log.
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

/// Waits for a child. True if it ended with 0; `None` if it was killed at the deadline.
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
