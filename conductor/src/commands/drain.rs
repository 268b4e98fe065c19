//! `conductor drain`: drains a worker or a conductor so that no request fails, and waits for the end of the drain.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};
use tutti_proto::cluster::v1::WorkerPhase;
use tutti_runtime::{Error, ErrorKind};
use tutti_settings::DrainProcessSettings;

use super::call::Calls;

/// Interval at which the conductor is asked about the drain.
const ASK: Duration = Duration::from_millis(200);
/// Minimum time to wait for each answer of the conductor, even if the command's own timeout ends sooner.
const LAST_ANSWER: Duration = Duration::from_secs(1);

/// Drains the worker or the conductor that the settings name. Returns the line to print.
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
        // A worker that joined by hand is not expected back. Once it has left, the conductor no longer lists it.
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
    let started_us = calls.cluster().await?.started_us;
    calls.drain_conductor().await?;
    let deadline = Instant::now() + patience;
    loop {
        let until = deadline.max(Instant::now() + LAST_ANSWER);
        let seen = timeout_at(until, Seen::now(&settings, started_us)).await.unwrap_or(Seen::Silent);
        let state = match seen {
            Seen::Gone => return Ok("the conductor is drained\n".into()),
            Seen::Draining { requests } => format!("still has {requests} requests"),
            Seen::Silent => "does not answer, and its port is not closed".to_owned(),
        };
        if Instant::now() >= deadline {
            let message = format!("the conductor {state} after {patience:?}; it goes on draining");
            return Err(Error::new(ErrorKind::DeadlineExceeded, message));
        }
        sleep(ASK).await;
    }
}

/// State of a conductor that was asked to drain.
enum Seen {
    /// The conductor still answers.
    Draining {
        /// Number of requests in flight.
        requests: u32,
    },
    /// No process listens at the conductor's address any more, or a later conductor listens there.
    Gone,
    /// The conductor does not answer: its process is stopped, or the network is cut.
    Silent,
}

impl Seen {
    /// Asks the conductor over a new connection. A draining conductor closes its open connections, but still accepts
    /// new ones.
    async fn now(settings: &DrainProcessSettings, started_us: u64) -> Self {
        let calls = match Calls::connect(&settings.call, &settings.cluster_tls).await {
            Ok(calls) => calls,
            Err(unreached) if unreached.nothing_listens => return Self::Gone,
            Err(_) => return Self::Silent,
        };
        match calls.cluster().await {
            Ok(cluster) if cluster.started_us != started_us => Self::Gone,
            Ok(cluster) => Self::Draining { requests: cluster.requests_in_flight },
            Err(_) => Self::Silent,
        }
    }
}
