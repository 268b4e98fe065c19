//! `conductor status`: the workers and the queue of a running conductor.

use std::time::Duration;

use serde::Serialize;
use tutti_proto::cluster::v1 as pb;
use tutti_runtime::{Error, ErrorKind, worker_view::WorkerView};
use tutti_settings::StatusProcessSettings;

use super::{
    call::Calls,
    table::{duration, table},
};

/// Calls the conductor and returns the report.
pub(super) async fn run(calls: Calls, settings: StatusProcessSettings) -> Result<String, Error> {
    let cluster = calls.cluster().await?;
    let (ready, reason) = match calls.describe().await {
        Ok(description) => (description.ready, description.reason),
        // Until a worker has loaded the model, the conductor answers with an error that says why it is not ready.
        Err(error) if error.kind() == ErrorKind::Unavailable => (false, error.message().to_owned()),
        Err(error) => return Err(error),
    };
    let report = Report::new(cluster, ready, reason);
    if settings.report.json {
        let text = serde_json::to_string_pretty(&report)
            .map_err(|e| Error::internal(format!("the report does not serialise: {e}")))?;
        return Ok(text + "\n");
    }
    Ok(report.text())
}

/// The report, in the shape of its JSON.
#[derive(Serialize)]
struct Report {
    model: String,
    build: String,
    /// Seconds since the conductor's start, by its own clock.
    up_s: u64,
    ready: bool,
    /// The reason why the cluster is not ready; empty if it is ready.
    reason: String,
    draining: bool,
    requests: Queue,
    workers: Vec<WorkerView>,
}

#[derive(Serialize)]
struct Queue {
    in_flight: u32,
    /// Number of requests that have not been in any step yet.
    waiting: u32,
    /// Waiting time of the oldest waiting request.
    oldest_waiting_ms: u32,
    /// Maximum number of requests in flight; 0 while no requests are taken.
    limit: u32,
}

impl Report {
    fn new(cluster: pb::GetClusterResponse, ready: bool, reason: String) -> Self {
        let loads = || cluster.workers.iter().filter_map(|worker| worker.load);
        let requests = Queue {
            in_flight: cluster.requests_in_flight,
            waiting: loads().map(|load| load.waiting).sum(),
            oldest_waiting_ms: loads().map(|load| load.oldest_waiting_ms).max().unwrap_or_default(),
            limit: cluster.requests_limit,
        };
        Self {
            model: cluster.model,
            build: cluster.build,
            up_s: Duration::from_micros(cluster.now_us.saturating_sub(cluster.started_us)).as_secs(),
            ready,
            reason,
            draining: cluster.draining,
            requests,
            workers: cluster.workers.into_iter().map(WorkerView::from).collect(),
        }
    }

    fn text(&self) -> String {
        let Queue { in_flight, waiting, oldest_waiting_ms, limit } = self.requests;
        let state = match (self.ready, self.draining) {
            (_, true) => "draining".to_owned(),
            (true, false) => "ready".to_owned(),
            (false, false) => format!("not ready: {}", self.reason),
        };
        let oldest = duration(u64::from(oldest_waiting_ms) * 1000);
        let up = duration(self.up_s * 1_000_000);
        let mut text =
            format!("model     {} (build {}, up {up})\nstate     {state}\n", self.model, self.build);
        text += &format!("requests  {in_flight} in flight, {waiting} waiting");
        if waiting > 0 {
            text += &format!(" (the oldest for {oldest})");
        }
        text += &format!(", limit {limit}\n\n");
        let head = ["WORKER", "ROLE", "STATE", "GROUP", "KV", "RUNNING", "WAITING", "HEARD", "PID", "DEVICE"];
        let is_number = [true, false, false, false, true, true, true, true, true, false];
        let rows: Vec<_> = self.workers.iter().map(row).collect();
        text += &table(head, is_number, &rows);
        for WorkerView { worker, detail, .. } in
            self.workers.iter().filter(|worker| !worker.detail.is_empty())
        {
            text += &format!("worker {worker}: {detail}\n");
        }
        text
    }
}

/// A worker's row in the table.
fn row(worker: &WorkerView) -> [String; 10] {
    let none = || "-".to_owned();
    let kv = match worker.kv_pages_total {
        0 => none(),
        total => {
            let percent = 100.0 * f64::from(worker.kv_pages_used) / f64::from(total);
            format!("{percent:.1}% of {total}")
        }
    };
    let here = worker.heard_ms.is_some();
    let number = |number: u32| if here { number.to_string() } else { none() };
    [
        worker.worker.to_string(),
        worker.role.to_owned(),
        worker.state.to_owned(),
        worker.group.clone(),
        kv,
        number(worker.running),
        number(worker.waiting),
        worker.heard_ms.map_or_else(none, |ms| format!("{:.1} s", f64::from(ms) / 1e3)),
        number(worker.pid),
        if worker.device.is_empty() { none() } else { worker.device.clone() },
    ]
}
