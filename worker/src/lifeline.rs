//! What ties a spawned worker to its conductor: a pipe at stdin, and the parent-death signal.
//!
//! The pipe's first line is what the conductor tells its child privately; its end is the end of the conductor. The
//! signal does the same for a worker that is stopped and cannot read. Neither depends on the conductor ending well.

use std::{
    io::{BufRead, BufReader, Read},
    process, thread,
};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};
use tutti_runtime::{Error, exit};
use tutti_settings::TelemetrySettings;

/// The pipe's first line, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lifeline {
    /// The conductor's process.
    pub parent_pid: u32,
    /// Shows at the gate that this worker is the conductor's own.
    pub join_token: String,
    /// What to log, and where spans go.
    pub telemetry: TelemetrySettings,
}

impl Lifeline {
    /// Ties this process to its parent from here on and reads what the parent has to say.
    pub fn take() -> Result<Self, Error> {
        set_parent_process_death_signal(Some(Signal::KILL))
            .map_err(|e| Error::internal(format!("cannot ask for the parent-death signal: {e}")))?;
        let mut stdin = BufReader::new(std::io::stdin());
        let mut line = String::new();
        stdin.read_line(&mut line).map_err(|e| Error::internal(format!("cannot read the lifeline: {e}")))?;
        let lifeline: Self = serde_json::from_str(&line)
            .map_err(|e| Error::internal(format!("the lifeline does not say what it should: {e}")))?;
        // A conductor that died before the signal was asked for has left this process to another parent.
        if getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs()) != Some(lifeline.parent_pid) {
            return Err(Error::internal("the conductor has died already"));
        }
        thread::Builder::new()
            .name("lifeline".into())
            .spawn(move || watch(stdin))
            .map_err(|e| Error::internal(format!("cannot watch the lifeline: {e}")))?;
        Ok(lifeline)
    }
}

/// Ends the process with the pipe. The conductor writes nothing after the first line.
fn watch(mut stdin: impl Read) {
    let mut ignored = [0; 64];
    while let Ok(1..) = stdin.read(&mut ignored) {}
    eprintln!("worker {}: the conductor is gone", process::id());
    process::exit(exit::INTERNAL.into());
}
