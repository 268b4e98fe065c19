//! A running cluster behind its services: the worker_service, the workers, and how they end.

use std::{fs::File, io::Read, path::PathBuf, sync::Arc, time::Duration};

use tokio::{task::JoinHandle, time::timeout};
use tutti_runtime::{Error, health::Health, metrics::Metrics, progress::LoadDisplay};

use crate::{
    cluster::{Cluster, Limits, Served},
    listen::WorkerListener,
    private_directory::PrivateDirectory,
    supervise::{Supervisor, WorkerCommand},
    worker_service::{Admission, WorkerService},
};

/// What a backend is made of. The worker's own contracts stay opaque to this crate: they are text here.
pub struct BackendOptions {
    /// The bounds to work under.
    pub limits: Limits,
    /// What is known of the model before a worker has loaded it.
    pub served: Served,
    /// Where workers dial in.
    pub listener: WorkerListener,
    /// The executable that acts as a worker when its name is `worker`.
    pub worker_program: PathBuf,
    /// Given to the workers of each group of the topology in their Welcome.
    pub worker_settings: Vec<String>,
    /// What spawned workers show at the worker_service; see [`random_token`].
    pub spawn_token: String,
    /// The first line of each spawned worker's stdin; the token is in it.
    pub lifeline_line: String,
    /// The secret of workers that join by hand.
    pub join_token: Option<String>,
    /// Where loading shows.
    pub display: LoadDisplay,
}

/// A cluster whose workers run, or are being started.
pub struct Backend {
    cluster: Arc<Cluster>,
    supervisor: Supervisor,
    worker_service: JoinHandle<Result<(), Error>>,
    /// Goes away with the backend.
    _meeting_places: Option<PrivateDirectory>,
    watchdog: JoinHandle<()>,
}

impl Backend {
    /// Opens the worker_service and spawns the workers. Must be called inside a Tokio runtime.
    pub fn start(options: BackendOptions, metrics: &Metrics, health: Health) -> Result<Self, Error> {
        let spawned_workers = options.limits.topology.spawned_workers();
        let command = WorkerCommand {
            program: options.worker_program,
            conductor_url: options.listener.local_url()?,
            lifeline_line: options.lifeline_line,
        };
        // A private socket is token enough.
        let open = options.listener.is_private().then(String::new);
        let join_token = options.join_token.or(open);
        let admission = Admission { spawned_workers, spawn_token: options.spawn_token, join_token };
        let meeting_places = options.limits.topology.has_tp().then(shared_memory_directory).transpose()?;
        let cluster = Cluster::new(options.limits, options.served, metrics, health);
        let cluster = Arc::new(match &meeting_places {
            Some(directory) => cluster.meeting_in(directory.path().to_owned()),
            None => cluster,
        });
        let worker_service =
            WorkerService::new(cluster.clone(), admission, options.worker_settings, options.display);
        let worker_service = tokio::spawn(worker_service.serve(options.listener));
        let watched = cluster.clone();
        let watchdog = tokio::spawn(async move { watched.watch().await });
        let supervisor = Supervisor::start(cluster.clone(), command, spawned_workers)?;
        Ok(Self { cluster, supervisor, worker_service, watchdog, _meeting_places: meeting_places })
    }

    /// The heart.
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    /// Completes only when the cluster cannot go on, with the reason.
    pub async fn failed(&mut self) -> Error {
        tokio::select! {
            error = self.cluster.fatal() => error,
            ended = &mut self.worker_service => match ended {
                Ok(Err(error)) => error,
                _ => Error::internal("the workers' worker_service has closed"),
            },
            _ = &mut self.watchdog => Error::internal("the watchdog over workers has ended"),
            () = self.supervisor.ended() => Error::internal("the supervisor of workers has ended"),
        }
    }

    /// Takes no more requests and lets those that run finish, for as long as `patience` lasts; then fails the rest.
    pub async fn drain(&self, patience: Duration) {
        self.cluster.begin_drain();
        if timeout(patience, self.cluster.idle()).await.is_err() {
            let left = self.cluster.status().requests_in_flight;
            tracing::warn!(requests = left, after = ?patience, "ending requests that have not finished");
        }
        self.cluster.dismiss();
    }

    /// Completes once all workers are gone. To be called after [`Backend::drain`].
    pub async fn stop(self) {
        self.supervisor.stop().await;
        self.watchdog.abort();
        self.worker_service.abort();
    }
}

/// Where the ranks of TP groups meet: in memory where the system has such a directory, so that nothing is ever written to
/// a disk.
fn shared_memory_directory() -> Result<PrivateDirectory, Error> {
    const MEMORY: &str = "/dev/shm";
    let memory = PathBuf::from(MEMORY);
    let parent = if memory.is_dir() { memory } else { std::env::temp_dir() };
    PrivateDirectory::new_in(&parent)
        .map_err(|e| Error::internal(format!("cannot make a directory in {}: {e}", parent.display())))
}

/// A secret that nobody can guess: 128 random bits.
pub fn random_token() -> Result<String, Error> {
    Ok(random_bytes()?.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The same as bytes.
pub(crate) fn random_bytes() -> Result<[u8; 16], Error> {
    let mut bytes = [0u8; 16];
    File::open("/dev/urandom")
        .and_then(|mut random| random.read_exact(&mut bytes))
        .map_err(|e| Error::internal(format!("cannot read /dev/urandom: {e}")))?;
    Ok(bytes)
}
