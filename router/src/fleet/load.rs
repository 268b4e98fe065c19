//! What a conductor has to do: this router's own requests to the block, the others' from what it reports.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use tutti_proto::cluster::v1 as pb;

use super::choice::Load;

/// This router's requests at one conductor. Counters only, so that streams never wait for one another.
#[derive(Debug, Default)]
pub struct OwnLoad {
    requests: AtomicU64,
    /// Of the requests, those without a token so far.
    waiting: AtomicU64,
    queued_blocks: AtomicU64,
    active_blocks: AtomicU64,
}

/// What a conductor said of itself, less what of it was ours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reported {
    /// Ready workers.
    pub workers: u32,
    /// Requests that run and that wait, of all routers.
    pub running: u32,
    /// See `running`.
    pub waiting: u32,
    /// Pages that requests hold, of all routers.
    pub kv_pages_used: u32,
    /// See `kv_pages_used`.
    pub kv_pages_total: u32,
    others_blocks: u64,
    others_waiting: u64,
}

impl Reported {
    /// Adds up a conductor's ready workers.
    pub fn of(cluster: &pb::GetClusterResponse, own: &OwnLoad) -> Self {
        let mut sum = Self::default();
        for worker in cluster.workers.iter().filter(|worker| worker.phase() == pb::WorkerPhase::Ready) {
            let load = worker.load.unwrap_or_default();
            sum.workers += 1;
            sum.running = sum.running.saturating_add(load.running);
            sum.waiting = sum.waiting.saturating_add(load.waiting);
            sum.kv_pages_used = sum.kv_pages_used.saturating_add(load.kv_pages_used);
            sum.kv_pages_total = sum.kv_pages_total.saturating_add(load.kv_pages_total);
        }
        let ours = own.active_blocks.load(Relaxed) + own.queued_blocks.load(Relaxed);
        sum.others_blocks = u64::from(sum.kv_pages_used).saturating_sub(ours);
        sum.others_waiting = u64::from(sum.waiting).saturating_sub(own.waiting.load(Relaxed));
        sum
    }

    /// The load as it is now. Requests of others that wait are taken to be as long as the one that asks.
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

/// One request's share of a conductor's load, for as long as it lives.
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
    /// A request that has so many prompt blocks to compute.
    pub fn new(own: Arc<OwnLoad>, uncached_blocks: usize) -> Self {
        let uncached_blocks = uncached_blocks as u64;
        own.requests.fetch_add(1, Relaxed);
        own.waiting.fetch_add(1, Relaxed);
        own.queued_blocks.fetch_add(uncached_blocks, Relaxed);
        Self { own, stage: Stage::Queued { uncached_blocks } }
    }

    /// It decodes, and its prompt and output fill so many blocks.
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
