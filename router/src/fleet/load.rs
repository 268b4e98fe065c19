//! The load of a conductor: the exact load of this router's requests, and an estimate of other routers' requests from
//! the conductor's report.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use serde::Serialize;
use tutti_proto::cluster::v1 as pb;

use super::choice::Load;

/// This router's requests on one conductor, as atomic counters, so that streams never wait for one another.
#[derive(Debug, Default)]
pub struct OwnLoad {
    requests: AtomicU64,
    /// Requests that have no output token yet.
    waiting: AtomicU64,
    queued_blocks: AtomicU64,
    active_blocks: AtomicU64,
}

/// A conductor's last report. The `others_` fields leave out this router's own requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reported {
    /// Ready workers.
    pub workers: u32,
    /// Running requests of all routers.
    pub running: u32,
    /// Waiting requests of all routers.
    pub waiting: u32,
    /// Waiting time of the oldest waiting request, in milliseconds.
    pub oldest_waiting_ms: u32,
    /// KV pages that the requests of all routers hold.
    pub kv_pages_used: u32,
    /// KV pages of all ready workers.
    pub kv_pages_total: u32,
    /// KV pages that the requests of other routers hold.
    others_blocks: u64,
    /// Waiting requests of other routers.
    others_waiting: u64,
}

/// Requests of all routers that have been in no step of a worker yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Queue {
    /// Their number.
    pub waiting: u64,
    /// Waiting time of the oldest of them, in milliseconds.
    pub oldest_waiting_ms: u32,
}

impl Queue {
    /// This queue and another one together.
    pub fn and(self, other: Self) -> Self {
        Self {
            waiting: self.waiting + other.waiting,
            oldest_waiting_ms: self.oldest_waiting_ms.max(other.oldest_waiting_ms),
        }
    }
}

impl Reported {
    /// The requests that wait.
    pub fn queue(&self) -> Queue {
        Queue { waiting: u64::from(self.waiting), oldest_waiting_ms: self.oldest_waiting_ms }
    }

    /// Sums the load of a conductor's ready workers.
    pub fn of(cluster: &pb::GetClusterResponse, own: &OwnLoad) -> Self {
        let mut sum = Self::default();
        for worker in cluster.workers.iter().filter(|worker| worker.phase() == pb::WorkerPhase::Ready) {
            let load = worker.load.unwrap_or_default();
            sum.workers += 1;
            sum.running = sum.running.saturating_add(load.running);
            sum.waiting = sum.waiting.saturating_add(load.waiting);
            sum.oldest_waiting_ms = sum.oldest_waiting_ms.max(load.oldest_waiting_ms);
            sum.kv_pages_used = sum.kv_pages_used.saturating_add(load.kv_pages_used);
            sum.kv_pages_total = sum.kv_pages_total.saturating_add(load.kv_pages_total);
        }
        let ours = own.active_blocks.load(Relaxed) + own.queued_blocks.load(Relaxed);
        sum.others_blocks = u64::from(sum.kv_pages_used).saturating_sub(ours);
        sum.others_waiting = u64::from(sum.waiting).saturating_sub(own.waiting.load(Relaxed));
        sum
    }

    /// The current load. `prompt_blocks` is the prompt length, in blocks, of the request to be placed. Each waiting
    /// request of another router is assumed to have the same prompt length, since its own is unknown.
    pub fn load(&self, own: &OwnLoad, prompt_blocks: usize) -> Load {
        Load {
            requests: own.requests.load(Relaxed),
            active_blocks: own.active_blocks.load(Relaxed).saturating_add(self.others_blocks),
            queued_blocks: own
                .queued_blocks
                .load(Relaxed)
                .saturating_add(self.others_waiting.saturating_mul(prompt_blocks as u64)),
            workers: self.workers,
        }
    }
}

/// One request's share of a conductor's load. Dropping the booking removes the share.
#[derive(Debug)]
pub struct Booking {
    own: Arc<OwnLoad>,
    stage: Stage,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    Queued { uncached_blocks: u64 },
    Active { blocks: u64 },
}

impl Booking {
    /// Adds a request that has this many prompt blocks to compute.
    pub fn new(own: Arc<OwnLoad>, uncached_blocks: usize) -> Self {
        let uncached_blocks = uncached_blocks as u64;
        own.requests.fetch_add(1, Relaxed);
        own.waiting.fetch_add(1, Relaxed);
        own.queued_blocks.fetch_add(uncached_blocks, Relaxed);
        Self { own, stage: Stage::Queued { uncached_blocks } }
    }

    /// Records that the request decodes, and that its prompt and output fill this many blocks.
    pub fn decodes(&mut self, blocks: usize) {
        let blocks = blocks as u64;
        match self.stage {
            Stage::Active { blocks: before } if before == blocks => return,
            Stage::Active { blocks: before } => _ = self.own.active_blocks.fetch_sub(before, Relaxed),
            Stage::Queued { uncached_blocks } => self.leave_queue(uncached_blocks),
        }
        self.own.active_blocks.fetch_add(blocks, Relaxed);
        self.stage = Stage::Active { blocks };
    }

    fn leave_queue(&self, uncached_blocks: u64) {
        self.own.waiting.fetch_sub(1, Relaxed);
        self.own.queued_blocks.fetch_sub(uncached_blocks, Relaxed);
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.own.requests.fetch_sub(1, Relaxed);
        match self.stage {
            Stage::Queued { uncached_blocks } => self.leave_queue(uncached_blocks),
            Stage::Active { blocks } => _ = self.own.active_blocks.fetch_sub(blocks, Relaxed),
        }
    }
}

#[cfg(test)]
mod tests;
