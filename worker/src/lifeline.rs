//! Ties a spawned worker to its conductor by a pipe at stdin and by the parent-death signal.
//!
//! The pipe's first line carries private settings from the conductor. The pipe closes when the conductor ends, and the
//! worker ends when the pipe closes. A stopped worker cannot read the pipe, but the signal ends it, too. Pipe and
//! signal work even if the conductor crashes or is killed.
//!
//! A worker that waits for its conductor's successor is not tied. It learns of the death from the end of its stream.

use std::{
    io::{BufRead, BufReader, Read},
    process, thread,
};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};
use tutti_runtime::{Error, command_line::processes::WORKER, exit};
use tutti_settings::{ClusterTlsSettings, TelemetrySettings};

/// The pipe's first line, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lifeline {
    /// Process id of the conductor.
    pub parent_pid: u32,
    /// Secret that proves to the conductor that it spawned this worker.
    pub join_token: String,
    /// Settings of logs and spans.
    pub telemetry: TelemetrySettings,
    /// Encryption inside the cluster. A spawned worker uses its conductor's certificate.
    pub cluster_tls: ClusterTlsSettings,
    /// Time in seconds for which the worker waits for another conductor after this one has died. None if the worker
    /// ends with this conductor.
    pub successor_timeout: Option<u32>,
}

impl Lifeline {
    /// Ties this process to its conductor and reads the conductor's line.
    pub fn take() -> Result<Self, Error> {
        set_parent_process_death_signal(Some(Signal::KILL))
            .map_err(|e| Error::internal(format!("cannot ask for the parent-death signal: {e}")))?;
        let mut stdin = BufReader::new(std::io::stdin());
        let mut line = String::new();
        stdin.read_line(&mut line).map_err(|e| Error::internal(format!("cannot read the lifeline: {e}")))?;
        let lifeline: Self = serde_json::from_str(&line)
            .map_err(|e| Error::internal(format!("cannot parse the lifeline: {e}")))?;
        // If the conductor died before the signal was requested, no signal arrives. This process then has another
        // parent.
        if getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs()) != Some(lifeline.parent_pid) {
            return Err(Error::internal("the conductor has died already"));
        }
        if lifeline.successor_timeout.is_some() {
            set_parent_process_death_signal(None)
                .map_err(|e| Error::internal(format!("cannot outlive the conductor: {e}")))?;
            return Ok(lifeline);
        }
        thread::Builder::new()
            .name("lifeline".into())
            .spawn(move || watch(stdin))
            .map_err(|e| Error::internal(format!("cannot watch the lifeline: {e}")))?;
        Ok(lifeline)
    }
}

/// Ends the process when the pipe closes. The conductor writes nothing after the first line.
fn watch(mut stdin: impl Read) {
    let mut ignored = [0; 64];
    while let Ok(1..) = stdin.read(&mut ignored) {}
    exit::at_once(exit::INTERNAL, WORKER.name, &format!("process {}: the conductor is gone", process::id()))
}
