//! Life and death of the worker processes that this conductor spawns.
//!
//! A child must not outlive its conductor, however that one ends. Three ties see to it: the *lifeline* (a pipe to the
//! child's stdin, whose end is the child's end), the parent-death signal (which reaches a stopped child too), and the
//! end of its stream. Linux sends the parent-death signal when the *thread* that spawned the child ends, so children are
//! spawned and waited for on one thread that lives as long as the process.

mod backoff;
mod child;

use std::{path::PathBuf, process::ExitStatus, sync::Arc, thread, time::Duration};

use tokio::{
    sync::{oneshot, watch},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tutti_proto::Rank;
use tutti_runtime::{Error, exit};

use self::{
    backoff::{Backoff, WELL},
    child::Child,
};
use crate::cluster::{Cluster, Exit, Presence};

/// How long a worker may take to leave once it was told to, or once its stream has ended.
const GRACE: Duration = Duration::from_secs(5);
/// How long a child may take to join, which it does before it loads anything.
const JOINING: Duration = Duration::from_secs(60);
/// How often a living child is held against what the cluster knows of it.
const CHECK_EVERY: Duration = Duration::from_millis(200);

/// How to start a worker.
#[derive(Clone, Debug)]
pub struct WorkerCommand {
    /// The executable, which acts as a worker when its name is `worker`.
    pub program: PathBuf,
    /// What the worker dials.
    pub conductor_url: String,
    /// Written to the child's stdin first, as one line: what others must not see in its command line.
    pub lifeline_line: String,
}

/// Keeps `ranks` worker processes alive until it is stopped.
#[derive(Debug)]
pub struct Supervisor {
    stop: watch::Sender<bool>,
    stopped: oneshot::Receiver<()>,
}

impl Supervisor {
    /// Spawns workers of ranks 0 to `workers` - 1.
    pub fn start(cluster: Arc<Cluster>, command: WorkerCommand, workers: u32) -> Result<Self, Error> {
        let failed = |e| Error::internal(format!("cannot start the supervisor: {e}"));
        let (stop, stopping) = watch::channel(false);
        let (done, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let supervise = async move {
            let mut ranks = JoinSet::new();
            for rank in (0..workers).map(Rank) {
                let supervisor = RankSupervisor { rank, cluster: cluster.clone(), command: command.clone() };
                ranks.spawn(supervisor.run(stopping.clone()));
            }
            ranks.join_all().await;
            // Nobody waits any more where the process is ending at once.
            let _ = done.send(());
        };
        thread::Builder::new()
            .name("supervisor".into())
            .spawn(move || runtime.block_on(supervise))
            .map_err(failed)?;
        Ok(Self { stop, stopped })
    }

    /// Completes only when the supervisor's thread is gone, which it should not be before it is stopped.
    pub async fn ended(&mut self) {
        let _ = (&mut self.stopped).await;
    }

    /// Starts no worker again, and completes once all have left; what is still there after a while is killed.
    pub async fn stop(self) {
        self.stop.send_replace(true);
        // An error means that the supervisor's thread is gone, and then its children are.
        let _ = self.stopped.await;
    }
}

/// Keeps one rank's process alive.
struct RankSupervisor {
    rank: Rank,
    cluster: Arc<Cluster>,
    command: WorkerCommand,
}

impl RankSupervisor {
    async fn run(self, mut stopping: watch::Receiver<bool>) {
        let mut backoff = Backoff::default();
        loop {
            if self.cluster.is_drained(self.rank) {
                return stopped(&mut stopping).await;
            }
            let born = Instant::now();
            let (status, usage) = match Child::spawn(&self.command, self.rank).await {
                Ok(child) => self.watch_over(child, born, &mut stopping).await,
                Err(error) => (format!("it cannot be started: {error}"), false),
            };
            if *stopping.borrow() {
                return;
            }
            let pause = backoff.after(born.elapsed());
            if !self.cluster.is_drained(self.rank) {
                tracing::warn!(worker = %self.rank, status, restart_in = ?pause, "worker process ended");
                self.cluster.on_exit(self.rank, &Exit { status, usage, early_exits: backoff.early_exits() });
                tokio::select! {
                    () = sleep(pause) => {}
                    () = stopped(&mut stopping) => return,
                }
                self.cluster.on_restart(self.rank);
            }
        }
    }

    /// Waits for the child's end: its status, and whether the child found its settings unusable.
    async fn watch_over(
        &self,
        mut child: Child,
        born: Instant,
        stopping: &mut watch::Receiver<bool>,
    ) -> (String, bool) {
        let mut well = false;
        let status = loop {
            tokio::select! {
                status = child.wait() => break status,
                () = stopped(stopping) => {
                    if self.cluster.presence(self.rank, child.pid()) == Presence::Awaited {
                        // It could not be told to leave, and holds nothing that could be lost.
                        child.kill();
                    }
                    break self.see_off(&mut child, "the cluster ends").await;
                }
                () = sleep(CHECK_EVERY) => match self.cluster.presence(self.rank, child.pid()) {
                    // A stopped process would not hear anything else.
                    Presence::Fenced => {
                        child.kill();
                        break child.wait().await;
                    }
                    Presence::Left => break self.see_off(&mut child, "its stream has ended").await,
                    Presence::Awaited if born.elapsed() >= JOINING => {
                        tracing::warn!(worker = %self.rank, pid = child.pid(), "killing a worker that does not join");
                        child.kill();
                        break child.wait().await;
                    }
                    Presence::Here if !well && born.elapsed() >= WELL => {
                        well = true;
                        self.cluster.on_well(self.rank);
                    }
                    Presence::Here | Presence::Awaited => {}
                }
            }
        };
        match status {
            Ok(status) => (status.to_string(), status.code() == Some(exit::USAGE.into())),
            Err(error) => (format!("it cannot be waited for: {error}"), false),
        }
    }

    /// Gives a child that should leave its time, and then ends it.
    async fn see_off(&self, child: &mut Child, why: &str) -> std::io::Result<ExitStatus> {
        if let Ok(status) = timeout(GRACE, child.wait()).await {
            return status;
        }
        tracing::warn!(worker = %self.rank, pid = child.pid(), why, "killing a worker that does not leave");
        child.kill();
        child.wait().await
    }
}

/// Completes once the supervisor is to stop.
async fn stopped(stopping: &mut watch::Receiver<bool>) {
    // An error means that the supervisor was dropped: the process is ending.
    let _ = stopping.wait_for(|stop| *stop).await;
}
