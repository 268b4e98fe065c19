//! `conductor drain`: ends a worker or a conductor without a failed request, and waits for the end.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tutti_proto::cluster::v1::{GetClusterResponse, WorkerPhase};
use tutti_runtime::{Error, ErrorKind};
use tutti_settings::DrainProcessSettings;

use super::call::Calls;

/// Interval at which the conductor is asked about the drain.
const ASK: Duration = Duration::from_millis(200);

/// Drains what the settings name. Returns the line that is printed.
pub(super) async fn run(calls: Calls, settings: DrainProcessSettings) -> Result<String, Error> {
    let patience = Duration::from_secs(settings.target.timeout.into());
    match settings.target.worker {
        Some(worker) => drain_worker(&calls, worker, patience).await,
        None => drain_conductor(&calls, settings, patience).await,
    }
}

async fn drain_worker(calls: &Calls, worker: u32, patience: Duration) -> Result<String, Error> {
    calls.drain_worker(worker).await?;
    let deadline = Instant::now() + patience;
    loop {
        let cluster = calls.cluster().await?;
        let status = cluster.workers.iter().find(|status| status.worker == worker);
        // A worker that joined by hand is not expected back, so nothing is known of it once it has left.
        if status.is_none_or(|status| status.phase() == WorkerPhase::Drained) {
            return Ok(format!("worker {worker} is drained\n"));
        }
        if Instant::now() >= deadline {
            let left = status.and_then(|status| status.load).map_or(0, |load| load.running + load.waiting);
            let message =
                format!("worker {worker} still has {left} requests after {patience:?}; it goes on draining");
            return Err(Error::new(ErrorKind::DeadlineExceeded, message));
        }
        sleep(ASK).await;
    }
}

async fn drain_conductor(
    calls: &Calls,
    settings: DrainProcessSettings,
    patience: Duration,
) -> Result<String, Error> {
    let started = calls.cluster().await?.started_us;
    calls.drain_conductor().await?;
    let deadline = Instant::now() + patience;
    loop {
        // A new connection each time: the process closes those that it has while it drains, and still answers new ones.
        let Some(cluster) = still_there(&settings, started).await else {
            return Ok("the conductor is drained\n".into());
        };
        if Instant::now() >= deadline {
            let left = cluster.requests_in_flight;
            let message =
                format!("the conductor still has {left} requests after {patience:?}; it goes on draining");
            return Err(Error::new(ErrorKind::DeadlineExceeded, message));
        }
        sleep(ASK).await;
    }
}

/// The cluster of the conductor that started at this time; `None` if there is no such process any more.
async fn still_there(settings: &DrainProcessSettings, started_us: u64) -> Option<GetClusterResponse> {
    let calls = Calls::connect(&settings.call, &settings.cluster_tls).await.ok()?;
    let cluster = calls.cluster().await.ok()?;
    (cluster.started_us == started_us).then_some(cluster)
}
