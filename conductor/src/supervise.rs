//! Supervision of the worker processes that this conductor spawns, or takes over from the conductor before.
//!
//! Without a [state directory](crate::state_directory), a child must not outlive its conductor, however the conductor
//! ends. Three mechanisms end the child: the *lifeline* (a pipe to the child's stdin: the child exits when the pipe
//! closes), the parent-death signal (which also ends a stopped child), and the end of the child's stream to the
//! conductor. Linux sends the parent-death signal when the *thread* that spawned the child ends, so children are
//! spawned and awaited on one thread that runs as long as the process.

mod backoff;
mod child;

use std::{
    collections::BTreeMap, io, os::unix::process::ExitStatusExt, path::PathBuf, process::ExitStatus,
    sync::Arc, thread, time::Duration,
};

use rustix::process::Signal;
use tokio::{
    sync::{oneshot, watch},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tutti_proto::Rank;
use tutti_runtime::{Error, exit};

use self::{
    backoff::{Backoff, WELL},
    child::{Child, KeptDirectories},
};
use crate::{
    cluster::{Cause, Cluster, Exit, Presence},
    private_directory::OwnerLock,
    state_directory::{StateDirectory, Survivor},
};

/// Time within which a worker must leave after it was told to leave, or after its stream has ended.
const GRACE: Duration = Duration::from_secs(5);
/// Pause before another try of a replica whose processes are killed while they load the model. Memory that others held
/// may be free then. A shorter one would take more of theirs.
const GIVEN_UP: Duration = Duration::from_secs(600);
/// Time within which a new child must join. Loading does not count, because a child joins before it loads the model.
const JOINING: Duration = Duration::from_secs(60);
/// Time between two checks of a child's presence in the cluster.
const CHECK_EVERY: Duration = Duration::from_millis(200);

/// The command that starts a worker.
#[derive(Clone, Debug)]
pub struct WorkerCommand {
    /// The executable, which acts as a worker when its name is `worker`.
    pub program: PathBuf,
    /// The URL that the worker dials.
    pub conductor_url: String,
    /// First line of the child's stdin, for secrets that must not show in its command line.
    pub lifeline_line: String,
}

/// The workers that a conductor takes over, and the directory that passes its own on. By default there is neither.
#[derive(Debug, Default)]
pub struct Succession {
    /// The directory in which processes are recorded.
    pub directory: Option<Arc<StateDirectory>>,
    /// Workers of the conductor before.
    pub survivors: BTreeMap<Rank, Survivor>,
    /// The lock of the directory in which TP groups meet, which the workers share; `None` if there are none.
    pub meeting: Option<OwnerLock>,
}

/// Keeps worker processes running until it is stopped.
#[derive(Debug)]
pub struct Supervisor {
    stop: watch::Sender<bool>,
    stopped: oneshot::Receiver<()>,
}

impl Supervisor {
    /// Spawns workers of ranks 0 to `workers` - 1, except those that `succession` has already. `workers` is 0 if all
    /// workers join by hand.
    pub fn start(
        cluster: Arc<Cluster>,
        command: WorkerCommand,
        workers: u32,
        succession: Succession,
    ) -> Result<Self, Error> {
        let Succession { directory, mut survivors, meeting } = succession;
        let failed = |e| Error::internal(format!("cannot start the supervisor: {e}"));
        let (stop, mut stopping) = watch::channel(false);
        let (done, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let supervise = async move {
            let mut ranks = JoinSet::new();
            for rank in (0..workers).map(Rank) {
                let (cluster, command) = (cluster.clone(), command.clone());
                let (directory, meeting) = (directory.clone(), meeting.clone());
                let supervisor = RankSupervisor { rank, cluster, command, directory, meeting };
                ranks.spawn(supervisor.run(survivors.remove(&rank), stopping.clone()));
            }
            ranks.join_all().await;
            if workers == 0 {
                // An error means that the supervisor is dropped, so no task waits for its end.
                let _ = stopping.wait_for(|stop| *stop).await;
            }
            // Ignored: sending fails if the process ends without waiting for the supervisor.
            let _ = done.send(());
        };
        thread::Builder::new()
            .name("supervisor".into())
            .spawn(move || runtime.block_on(supervise))
            .map_err(failed)?;
        Ok(Self { stop, stopped })
    }

    /// Completes when the supervisor's thread has ended, which is a fault unless the supervisor was told to stop.
    pub async fn ended(&mut self) {
        let _ = (&mut self.stopped).await;
    }

    /// Stops restarting workers, and completes once all workers have left. Workers that do not leave in time are
    /// killed.
    pub async fn stop(self) {
        self.stop.send_replace(true);
        // An error is ignored: it means that the supervisor's thread has already ended, and the workers with it.
        let _ = self.stopped.await;
    }
}

/// Keeps the worker process of one rank running.
struct RankSupervisor {
    rank: Rank,
    cluster: Arc<Cluster>,
    command: WorkerCommand,
    directory: Option<Arc<StateDirectory>>,
    meeting: Option<OwnerLock>,
}

/// The start of a child: of its process, or of its supervision if it was taken over.
#[derive(Clone, Copy, Debug)]
struct Start {
    at: Instant,
    /// Time within which the child must join.
    joins_within: Duration,
}

/// The end of a child.
struct ChildExit {
    /// The exit status in words.
    status: String,
    cause: Cause,
}

impl ChildExit {
    fn new(status: io::Result<Option<ExitStatus>>, killer: Killer) -> Self {
        let cause = match (&status, killer) {
            (Ok(Some(status)), _) if status.code() == Some(exit::USAGE.into()) => Cause::Usage,
            (Ok(Some(status)), Killer::Other) if status.signal() == Some(Signal::KILL.as_raw()) => {
                Cause::Killed
            }
            _ => Cause::Other,
        };
        let status = match status {
            Ok(Some(status)) => status.to_string(),
            Ok(None) => "not known, because the conductor before started the process".into(),
            Err(error) => format!("it cannot be waited for: {error}"),
        };
        Self { status, cause }
    }
}

/// The sender of the signal that ended a child, if a signal did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Killer {
    /// This supervisor.
    Supervisor,
    /// Another process, or the kernel.
    Other,
}

impl RankSupervisor {
    async fn run(self, mut survivor: Option<Survivor>, mut stopping: watch::Receiver<bool>) {
        let mut backoff = Backoff::default();
        loop {
            if self.cluster.is_drained(self.rank) {
                return stopped(&mut stopping).await;
            }
            if self.cluster.is_given_up(self.rank) {
                tokio::select! {
                    () = sleep(GIVEN_UP) => self.cluster.retry_given_up(self.rank),
                    () = stopped(&mut stopping) => return,
                }
                // The rank may have been drained meanwhile.
                continue;
            }
            let mut start = Start { at: Instant::now(), joins_within: JOINING };
            let child = match survivor.take() {
                Some(survivor) => {
                    // It tries several times per second, but first ends the step that it is in.
                    start.joins_within += self.cluster.limits().faults.hang_timeout();
                    Child::inherit(survivor)
                }
                None => {
                    let kept =
                        KeptDirectories { state: self.directory.as_deref(), meeting: self.meeting.as_ref() };
                    Child::spawn(&self.command, self.rank, kept).await
                }
            };
            let ended = match child {
                Ok(mut child) => {
                    let status = self.supervise(&mut child, start, &mut stopping).await;
                    self.directory.iter().for_each(|directory| directory.ended(self.rank));
                    ChildExit::new(status, if child.is_killed() { Killer::Supervisor } else { Killer::Other })
                }
                Err(error) => {
                    ChildExit { status: format!("it cannot be started: {error}"), cause: Cause::Other }
                }
            };
            if *stopping.borrow() {
                return;
            }
            let pause = backoff.after(start.at.elapsed());
            if !self.cluster.is_drained(self.rank) {
                let ChildExit { status, cause } = ended;
                tracing::warn!(
                    worker = self.rank.0,
                    exit_status = status,
                    restart_in_ms = pause.as_millis() as u64,
                    "worker process ended"
                );
                let early_exits = backoff.early_exits();
                self.cluster.on_exit(self.rank, &Exit { status, cause, early_exits });
                if self.cluster.is_given_up(self.rank) {
                    continue;
                }
                tokio::select! {
                    () = sleep(pause) => {}
                    () = stopped(&mut stopping) => return,
                }
                if !self.cluster.is_drained(self.rank) && !self.cluster.is_given_up(self.rank) {
                    self.cluster.on_restart(self.rank);
                }
            }
        }
    }

    /// Waits for the child's end. Kills the child if it does not join in time, does not leave in time, or is fenced.
    async fn supervise(
        &self,
        child: &mut Child,
        start: Start,
        stopping: &mut watch::Receiver<bool>,
    ) -> io::Result<Option<ExitStatus>> {
        let mut well = false;
        loop {
            tokio::select! {
                status = child.wait() => return status,
                () = stopped(stopping) => {
                    if self.cluster.presence(self.rank, child.pid()) == Presence::Awaited {
                        // A child that has not joined is killed at once: it holds no requests, and has no stream over
                        // which the conductor could tell it to leave.
                        child.kill();
                    }
                    return self.see_off(child, "the cluster ends").await;
                }
                () = sleep(CHECK_EVERY) => match self.cluster.presence(self.rank, child.pid()) {
                    // A fenced process may be stopped (SIGSTOP), and only SIGKILL ends a stopped process.
                    Presence::Fenced => {
                        child.kill();
                        return child.wait().await;
                    }
                    Presence::Left => return self.see_off(child, "its stream has ended").await,
                    Presence::Awaited if start.at.elapsed() >= start.joins_within => {
                        tracing::warn!(worker = self.rank.0, pid = child.pid(), "killing a worker that does not join");
                        child.kill();
                        return child.wait().await;
                    }
                    Presence::Here if !well && start.at.elapsed() >= WELL => {
                        well = true;
                        self.cluster.on_well(self.rank);
                    }
                    Presence::Here | Presence::Awaited => {}
                }
            }
        }
    }

    /// Waits for a child that should leave, and kills it after the grace period.
    async fn see_off(&self, child: &mut Child, why: &str) -> io::Result<Option<ExitStatus>> {
        if let Ok(status) = timeout(GRACE, child.wait()).await {
            return status;
        }
        tracing::warn!(worker = self.rank.0, pid = child.pid(), why, "killing a worker that does not leave");
        child.kill();
        child.wait().await
    }
}

/// Completes once the supervisor is stopped.
async fn stopped(stopping: &mut watch::Receiver<bool>) {
    // An error is ignored: it means that the supervisor was dropped because the process is ending.
    let _ = stopping.wait_for(|stop| *stop).await;
}
