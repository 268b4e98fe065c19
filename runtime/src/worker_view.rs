//! A worker as operators see it, in the output of `conductor status` and on the router's page.

use serde::Serialize;
use tutti_proto::cluster::v1 as pb;

/// A worker's identity, state and last load, in the shape of its JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs, reason = "the fields are those of the messages in view.proto and worker.proto")]
pub struct WorkerView {
    pub worker: u32,
    pub role: &'static str,
    pub state: &'static str,
    pub group: String,
    pub device: String,
    pub pid: u32,
    /// Milliseconds since the worker's last message; `null` if the worker is not connected.
    pub heard_ms: Option<u32>,
    pub running: u32,
    pub waiting: u32,
    pub oldest_waiting_ms: u32,
    pub kv_pages_used: u32,
    pub kv_pages_cached: u32,
    pub kv_pages_total: u32,
    pub slots_used: u32,
    pub slots_total: u32,
    pub steps: u64,
    pub preemptions: u64,
    pub prefill_tokens: u64,
    pub cached_tokens: u64,
    pub restarts: u64,
    pub resident_bytes: Option<u64>,
    /// The last problem of this rank; empty if there is none.
    pub detail: String,
}

impl From<pb::WorkerStatus> for WorkerView {
    fn from(status: pb::WorkerStatus) -> Self {
        let (role, state) = (status.role().label(), status.phase().label());
        let load = status.load.unwrap_or_default();
        Self {
            worker: status.worker,
            role,
            state,
            group: status.group,
            device: status.device,
            pid: status.pid,
            heard_ms: status.silent_ms,
            running: load.running,
            waiting: load.waiting,
            oldest_waiting_ms: load.oldest_waiting_ms,
            kv_pages_used: load.kv_pages_used,
            kv_pages_cached: load.kv_pages_cached,
            kv_pages_total: load.kv_pages_total,
            slots_used: load.slots_used,
            slots_total: load.slots_total,
            steps: load.steps,
            preemptions: load.preemptions,
            prefill_tokens: load.prefill_tokens,
            cached_tokens: load.cached_tokens,
            restarts: status.restarts,
            resident_bytes: status.resident_bytes,
            detail: status.detail,
        }
    }
}
