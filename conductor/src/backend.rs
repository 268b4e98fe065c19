//! A running cluster with its worker service, watchdog and supervisor, from start to drain.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use tokio::{task::JoinHandle, time::timeout_at};
use tutti_proto::Rank;
use tutti_runtime::{
    Error,
    health::Health,
    metrics::Metrics,
    process::{Background, Drain},
    progress::LoadDisplay,
    serve::{ConnectionLimits, ConnectionMetrics},
    token::{self, Token},
};

use crate::{
    cluster::{Cluster, Limits, Served},
    listen::ClusterListener,
    private_directory::PrivateDirectory,
    state_directory::{StateDirectory, Survivor},
    supervise::{Succession, Supervisor, WorkerCommand},
    worker_service::{Admission, ByHand, WorkerService},
};

/// The inputs of [`Backend::start`]. Workers' settings are opaque text to this crate.
pub struct BackendOptions {
    /// The topology and the limits of the cluster.
    pub limits: Limits,
    /// The model's name, and whether it has a tokenizer. Both are known before a worker has loaded the model.
    pub served: Served,
    /// The listener that workers dial.
    pub listener: ClusterListener,
    /// Limits on the connections of workers.
    pub connections: ConnectionLimits,
    /// Counts of the connections of workers.
    pub connection_metrics: ConnectionMetrics,
    /// The executable of spawned workers. It acts as a worker when its `argv[0]` is `worker`.
    pub worker_program: PathBuf,
    /// Settings of the workers of each group, in the order of the topology. A worker receives them in its `Welcome`.
    pub worker_settings: Vec<String>,
    /// The token that spawned workers show when they join; see [`random_token`].
    pub spawn_token: Token,
    /// The first line of each spawned worker's stdin, which contains the token.
    pub lifeline_line: String,
    /// The secret that workers show when they join by hand; `None` if no secret is set.
    pub join_token: Option<Token>,
    /// Shows the progress of loading.
    pub display: LoadDisplay,
    /// The state directory and what it has passed on; `None` if workers end with this conductor.
    pub outliving: Option<Outliving>,
}

/// The way of workers from one conductor to the next.
pub struct Outliving {
    /// The directory, which this conductor holds.
    pub directory: Arc<StateDirectory>,
    /// Number of conductors that the workers have had before.
    pub life: u64,
    /// The workers of the conductor before.
    pub survivors: BTreeMap<Rank, Survivor>,
}

/// Kills the workers that are left when the value is dropped. A conductor that ends by itself, with an error or without
/// one, leaves none; only one that is killed or panics does.
struct LeavesNone(Arc<StateDirectory>);

impl Drop for LeavesNone {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.0.kill_all();
        }
    }
}

/// A cluster whose workers run or are being started.
pub struct Backend {
    cluster: Arc<Cluster>,
    supervisor: Supervisor,
    worker_service: JoinHandle<Result<(), Error>>,
    /// Directory where the ranks of TP groups meet; `None` if there are no TP groups. Removed when the backend is
    /// dropped. If this conductor is killed, it stays for as long as its workers live.
    _meeting_directory: Option<PrivateDirectory>,
    _leaves_none: Option<LeavesNone>,
    watchdog: JoinHandle<()>,
}

impl Backend {
    /// Serves workers and spawns them. Must be called inside a Tokio runtime.
    pub fn start(options: BackendOptions, metrics: &Metrics, health: Health) -> Result<Self, Error> {
        let spawned_workers = options.limits.topology.spawned_workers();
        let command = WorkerCommand {
            program: options.worker_program,
            conductor_url: options.listener.local_url()?,
            lifeline_line: options.lifeline_line,
        };
        let by_hand = match options.join_token {
            Some(token) => ByHand::WithToken(token),
            None if options.listener.is_private() => ByHand::Open,
            None => ByHand::Refused,
        };
        let admission = Admission { spawned_workers, spawn_token: options.spawn_token, by_hand };
        let meeting_directory = options.limits.topology.has_tp().then(shared_memory_directory).transpose()?;
        let cluster = Cluster::new(options.limits, options.served, metrics, health);
        let cluster = match &meeting_directory {
            Some(directory) => cluster.meeting_in(directory.path().to_owned()),
            None => cluster,
        };
        let (cluster, succession) = match options.outliving {
            Some(Outliving { directory, life, survivors }) => {
                // A group that is still loading meets in its directory after this conductor's death.
                let meeting = meeting_directory.as_ref().map(PrivateDirectory::lock);
                (cluster.outlived(life), Succession { directory: Some(directory), survivors, meeting })
            }
            None => (cluster, Succession::default()),
        };
        let cluster = Arc::new(cluster);
        let leaves_none = succession.directory.clone().map(LeavesNone);
        let worker_service =
            WorkerService::new(cluster.clone(), admission, options.worker_settings, options.display)
                .with_connections(options.connections, options.connection_metrics);
        let worker_service = tokio::spawn(worker_service.serve(options.listener));
        let watched = cluster.clone();
        let watchdog = tokio::spawn(async move { watched.watch().await });
        let supervisor = Supervisor::start(cluster.clone(), command, spawned_workers, succession)?;
        let (_meeting_directory, _leaves_none) = (meeting_directory, leaves_none);
        Ok(Self { cluster, supervisor, worker_service, watchdog, _meeting_directory, _leaves_none })
    }

    /// The running cluster, which the services call.
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }
}

impl Background for Backend {
    async fn failed(&mut self) -> Error {
        tokio::select! {
            error = self.cluster.fatal() => error,
            ended = &mut self.worker_service => match ended {
                Ok(Err(error)) => error,
                _ => Error::internal("the service that workers dial has ended"),
            },
            _ = &mut self.watchdog => Error::internal("the watchdog over workers has ended"),
            () = self.supervisor.ended() => Error::internal("the supervisor of workers has ended"),
        }
    }

    async fn drain(&mut self, Drain { patience, deadline }: Drain) {
        self.cluster.begin_drain();
        if timeout_at(deadline, self.cluster.idle()).await.is_err() {
            let left = self.cluster.status().requests_in_flight;
            tracing::warn!(
                requests = left,
                after_s = patience.as_secs_f64(),
                "ending requests that have not finished"
            );
        }
        self.cluster.dismiss();
    }

    async fn stop(self) {
        self.supervisor.stop().await;
        self.watchdog.abort();
        self.worker_service.abort();
    }
}

/// Creates the directory where the ranks of TP groups meet. If `/dev/shm` exists, the directory is there, so that
/// nothing is written to a disk.
fn shared_memory_directory() -> Result<PrivateDirectory, Error> {
    const MEMORY: &str = "/dev/shm";
    let memory = PathBuf::from(MEMORY);
    let parent = if memory.is_dir() { memory } else { std::env::temp_dir() };
    PrivateDirectory::new_in(&parent)
        .map_err(|e| Error::internal(format!("cannot make a directory in {}: {e}", parent.display())))
}

/// A secret of 128 random bits, in hexadecimal.
pub fn random_token() -> Result<String, Error> {
    Ok(token::random_bytes()?.iter().map(|byte| format!("{byte:02x}")).collect())
}
