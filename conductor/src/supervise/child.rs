//! One worker process: spawned by this conductor, or taken over from the one before.

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
use crate::{
    private_directory::OwnerLock,
    state_directory::{StateDirectory, Survivor, Watched},
};

/// Directories that a worker keeps beyond its conductor's death.
#[derive(Clone, Copy)]
pub struct KeptDirectories<'a> {
    /// Records the process before the worker can join.
    pub state: Option<&'a StateDirectory>,
    /// The lock of a directory, which the worker shares.
    pub meeting: Option<&'a OwnerLock>,
}

/// A worker's process.
#[derive(Debug)]
pub struct Child {
    process: Process,
    pid: u32,
    is_killed: bool,
}

#[derive(Debug)]
enum Process {
    /// A child of this process, which is killed when the value is dropped.
    Own {
        process: tokio::process::Child,
        /// The write end of the child's stdin, held open: the child exits when this end is closed, unless it waits for
        /// another conductor.
        _lifeline: Option<ChildStdin>,
    },
    /// A child of the conductor before.
    Inherited(Watched),
}

impl Child {
    /// Starts a worker in a process group of its own, so that Ctrl-C in a terminal does not reach the worker. Must be
    /// called on the supervisor's thread, since the child gets the parent-death signal when that thread ends.
    pub async fn spawn(
        command: &WorkerCommand,
        rank: Rank,
        KeptDirectories { state, meeting }: KeptDirectories<'_>,
    ) -> io::Result<Self> {
        let mut process = Command::new(&command.program);
        process
            .arg0("worker")
            .args(["--conductor", &command.conductor_url, "--rank", &rank.to_string()])
            .stdin(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        let mut process = match meeting {
            Some(meeting) => meeting.sharing(|| process.spawn())?,
            None => process.spawn()?,
        };
        let pid = process.id().unwrap_or_default();
        let mut lifeline = process.stdin.take();
        state.map_or(Ok(()), |state| state.started(rank, pid)).map_err(io::Error::other)?;
        if let Some(lifeline) = &mut lifeline {
            // An error is ignored: it means that the child has ended, and `wait` reports the end.
            let _ = lifeline.write_all(format!("{}\n", command.lifeline_line).as_bytes()).await;
        }
        tracing::debug!(worker = rank.0, pid, "spawned a worker");
        let process = Process::Own { process, _lifeline: lifeline };
        Ok(Self { process, pid, is_killed: false })
    }

    /// Takes over a worker of the conductor before.
    pub fn inherit(survivor: Survivor) -> io::Result<Self> {
        let watched = Watched::new(survivor)?;
        Ok(Self { pid: watched.pid(), process: Process::Inherited(watched), is_killed: false })
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// True once this process has killed the child.
    pub fn is_killed(&self) -> bool {
        self.is_killed
    }

    /// Completes when the process has ended. May be dropped and called again. The status is `None` if another process
    /// started this one, because only the parent learns the status.
    pub async fn wait(&mut self) -> io::Result<Option<ExitStatus>> {
        match &mut self.process {
            // Tokio's `wait` closes the child's stdin if `process` still owns it, so `spawn` has taken the stdin out of
            // `process`.
            Process::Own { process, .. } => process.wait().await.map(Some),
            Process::Inherited(watched) => {
                watched.ended().await;
                Ok(None)
            }
        }
    }

    /// Kills the process and its process group, which includes the processes that it has started.
    pub fn kill(&mut self) {
        self.is_killed = true;
        // Only a parent keeps the pid of an ended process from being used again, by waiting for it later.
        if matches!(&self.process, Process::Inherited(watched) if !watched.is_running()) {
            return;
        }
        let group = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let killed = group.map(|group| kill_process_group(group, Signal::KILL));
        if !matches!(killed, Some(Ok(()))) {
            tracing::debug!(pid = self.pid, "the worker's process group is already gone");
        }
    }
}
