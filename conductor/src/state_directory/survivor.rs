//! A worker's process that has outlived the conductor that started it.
//!
//! It is no child of this process, so its exit status is not known here. A process file descriptor (pidfd) becomes
//! readable when the process has ended. A pid may belong to another process by now, so that the time of the process's
//! start is compared, too, after the descriptor is open.

use std::{fs, os::fd::OwnedFd, time::Duration};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{Interest, unix::AsyncFd},
    time::timeout,
};

/// Time for which the end of a killed process is awaited.
const ENDING: Duration = Duration::from_secs(10);

/// Identifies a process within one boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessId {
    pub pid: u32,
    /// Time of the process's start, in clock ticks since the boot.
    pub started: u64,
}

impl ProcessId {
    /// The process with this pid; `None` if there is none, or if it has ended and was not waited for yet.
    pub fn of(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        Some(Self { pid, started: started(&stat)? })
    }
}

/// The time of start in a line of `/proc/PID/stat`; `None` for a zombie. The name before it may have spaces and
/// parentheses.
fn started(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?;
    // The state is field 3, and the time of start is field 22 (proc_pid_stat(5)).
    (state != "Z" && state != "X").then(|| fields.nth(18)?.parse().ok())?
}

/// A running process that this process did not start.
#[derive(Debug)]
pub struct Survivor {
    id: ProcessId,
    descriptor: OwnedFd,
}

impl Survivor {
    /// The process, if it still runs.
    pub fn find(id: ProcessId) -> Option<Self> {
        let descriptor = pidfd_open(raw(id.pid)?, PidfdFlags::NONBLOCK).ok()?;
        // The descriptor is open, so the pid cannot change its meaning unnoticed from here on.
        (ProcessId::of(id.pid) == Some(id)).then_some(Self { id, descriptor })
    }

    /// Identity of the process.
    pub fn id(&self) -> ProcessId {
        self.id
    }

    /// Kills the process and its process group, unless it has ended.
    pub fn kill(&self) {
        if let Some(group) = raw(self.id.pid).filter(|_| ProcessId::of(self.id.pid) == Some(self.id)) {
            // Ignored: the process may just have ended.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }

    /// Kills the process, and waits for its end.
    pub async fn end(self) {
        self.kill();
        let pid = self.id.pid;
        if let Ok(watched) = Watched::new(self)
            && timeout(ENDING, watched.ended()).await.is_err()
        {
            tracing::warn!(pid, "a worker of the conductor before does not end");
        }
    }
}

/// A process whose end can be awaited.
#[derive(Debug)]
pub struct Watched {
    id: ProcessId,
    descriptor: AsyncFd<OwnedFd>,
}

impl Watched {
    /// Must be called inside the Tokio runtime that awaits the end.
    pub fn new(survivor: Survivor) -> std::io::Result<Self> {
        let Survivor { id, descriptor } = survivor;
        // SAFETY: an `OwnedFd` returns the same open descriptor as long as it lives, and it lives as long as the
        // `AsyncFd`.
        let descriptor = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE)? };
        Ok(Self { id, descriptor })
    }

    /// The pid.
    pub fn pid(&self) -> u32 {
        self.id.pid
    }

    /// True if the process has not ended.
    pub fn is_running(&self) -> bool {
        ProcessId::of(self.id.pid) == Some(self.id)
    }

    /// Completes when the process has ended.
    pub async fn ended(&self) {
        // An error means that the runtime ends.
        let _ = self.descriptor.readable().await;
    }
}

fn raw(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}
