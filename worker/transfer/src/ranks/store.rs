//! Store of the shares that have arrived at a follower, until the leader orders their writes.
//!
//! The bytes in the store are bounded. Beyond the bound, runs wait in their streams. The leader orders each write as
//! soon as it learns of the arrival, whatever the other ranks have received, so full stores cannot wait for each other.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tonic::Status;
use tutti_proto::{
    GraphKey,
    cluster::v1::{self as pb, rank_report::Report},
};

use crate::{Filled, Run, UnitLayout, send::STAGED_BYTES};

/// The shares that have arrived at a rank.
pub(crate) struct ShareStore {
    rank: usize,
    requests: Mutex<HashMap<GraphKey, Arrived>>,
    /// Free room, with one permit per byte.
    room: Arc<Semaphore>,
    reports: mpsc::Sender<pb::RankReport>,
}

/// Arrived units of one request.
struct Arrived {
    filled: Filled,
    /// Runs that are not written yet, each with its bytes and its permits of `room`. Each run has been reported once.
    runs: Vec<(Run, Vec<u8>, OwnedSemaphorePermit)>,
}

impl ShareStore {
    pub fn new(rank: usize, reports: mpsc::Sender<pb::RankReport>) -> Self {
        let room = Arc::new(Semaphore::new(STAGED_BYTES));
        Self { rank, requests: Mutex::default(), room, reports }
    }

    fn requests(&self) -> MutexGuard<'_, HashMap<GraphKey, Arrived>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the store to a request of `count` pages, of which the first `known` are valid already.
    pub fn expect(&self, key: GraphKey, count: usize, known: usize) {
        self.requests().insert(key, Arrived { filled: Filled::new(count, known), runs: Vec::new() });
    }

    pub fn forget(&self, key: GraphKey) {
        self.requests().remove(&key);
    }

    /// Stores a run whose range and length have been checked, and reports it. Waits while there is no room.
    pub async fn put(&self, run: Run, data: Vec<u8>) -> Result<(), Status> {
        let Run { key, kind, first, count, .. } = run;
        // A run that is larger than the store takes all of its room.
        let bytes = data.len().min(STAGED_BYTES) as u32;
        let room = Arc::clone(&self.room).acquire_many_owned(bytes).await;
        let room = room.map_err(|_| Status::unavailable("the worker is ending"))?;
        {
            let mut requests = self.requests();
            let arrived = requests.get_mut(&key);
            let arrived =
                arrived.ok_or_else(|| Status::aborted(format!("{key} no longer waits for planes")))?;
            arrived.filled.fill(&run);
            arrived.runs.push((run, data, room));
        }
        let (kind, first, count) = (kind.index(), first as u32, count as u32);
        self.report(Report::Arrived(pb::ShareArrived { key: Some(key.into()), kind, first, count })).await
    }

    /// Checks that all of a request's share has arrived. A share that lacks units fails the request's transfer.
    pub async fn complete(
        &self,
        key: GraphKey,
        layout: &UnitLayout,
        hand_over: &pb::HandOver,
    ) -> Result<(), Status> {
        let missing = match self.requests().get(&key) {
            None => return Err(Status::aborted(format!("{key} no longer waits for planes"))),
            Some(arrived) => arrived.missing(layout, &hand_over.counts),
        };
        let Some(missing) = missing else { return Ok(()) };
        let reason = format!("of the share of rank {}, {missing}", self.rank);
        let failed = pb::ShareFailed { key: Some(key.into()), reason: reason.clone(), is_refused: false };
        self.report(Report::Failed(failed)).await?;
        Err(Status::data_loss(reason))
    }

    async fn report(&self, report: Report) -> Result<(), Status> {
        let sent = self.reports.send(pb::RankReport { report: Some(report) }).await;
        sent.map_err(|_| Status::unavailable("the worker is ending"))
    }

    /// Takes a run that has been reported.
    pub fn take(&self, run: &Run) -> Option<Vec<u8>> {
        let mut requests = self.requests();
        let runs = &mut requests.get_mut(&run.key)?.runs;
        let at = runs.iter().position(|(stored, ..)| stored == run)?;
        Some(runs.remove(at).1)
    }
}

impl Arrived {
    /// Returns an error that names the first missing unit, or `None` if all units have arrived. `counts` is the
    /// sender's count of its units.
    fn missing(&self, layout: &UnitLayout, counts: &[u32]) -> Option<String> {
        let pages = self.filled.count();
        let wanted = layout.counts(pages);
        if let Some(page) = self.filled.missing() {
            return Some(format!("page {page} of {pages} is missing"));
        }
        if layout.slot_bytes > 0 && !self.filled.has_slot() {
            return Some("the slot is missing".to_owned());
        }
        (counts != wanted).then(|| format!("{counts:?} units are handed over, but {wanted:?} are reserved"))
    }
}

#[cfg(test)]
mod tests;
