//! One spawned worker process.

use std::{
    io,
    process::{ExitStatus, Stdio},
};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{
    io::AsyncWriteExt,
    process::{ChildStdin, Command},
};
use tutti_proto::Rank;

use super::WorkerCommand;

/// A worker's process, which is killed when the value is dropped.
#[derive(Debug)]
pub struct Child {
    process: tokio::process::Child,
    pid: u32,
    is_killed: bool,
    /// The write end of the child's stdin, held open: the child exits when this end is closed.
    _lifeline: Option<ChildStdin>,
}

impl Child {
    /// Starts a worker in a process group of its own, so that Ctrl-C in a terminal does not reach the worker. Must be
    /// called on the supervisor's thread, since the child gets the parent-death signal when that thread ends.
    pub async fn spawn(command: &WorkerCommand, rank: Rank) -> io::Result<Self> {
        let mut process = Command::new(&command.program)
            .arg0("worker")
            .args(["--conductor", &command.conductor_url, "--rank", &rank.to_string()])
            .stdin(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let pid = process.id().unwrap_or_default();
        let mut lifeline = process.stdin.take();
        if let Some(lifeline) = &mut lifeline {
            // An error is ignored: it means that the child has ended, and `wait` reports the end.
            let _ = lifeline.write_all(format!("{}\n", command.lifeline_line).as_bytes()).await;
        }
        tracing::debug!(worker = rank.0, pid, "spawned a worker");
        Ok(Self { process, pid, is_killed: false, _lifeline: lifeline })
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// True once this process has killed the child.
    pub fn is_killed(&self) -> bool {
        self.is_killed
    }

    /// Completes when the process has ended. May be dropped and called again.
    pub async fn wait(&mut self) -> io::Result<ExitStatus> {
        // Tokio's `wait` closes the child's stdin if `process` still owns it, so `spawn` has taken the stdin out of
        // `process`.
        self.process.wait().await
    }

    /// Kills the process and its process group, which includes the processes that it has started.
    pub fn kill(&mut self) {
        self.is_killed = true;
        let group = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let killed = group.map(|group| kill_process_group(group, Signal::KILL));
        if !matches!(killed, Some(Ok(()))) {
            tracing::debug!(pid = self.pid, "the worker's process group is already gone");
        }
    }
}
