//! One worker graph at its workers, from its launch until every rank has completed it.

use std::collections::BTreeMap;

use tutti_proto::{Epoch, GraphKey, Rank, WorkerId, cluster::v1 as pb};

use super::Dropped;

/// The ranks that run a worker graph, each with its worker. The lowest rank is the leader: its rows carry the tokens.
pub type Members = BTreeMap<Rank, WorkerId>;

/// A worker graph's ranks, and the ranks that have not completed the graph yet.
#[derive(Debug)]
pub(super) struct Run {
    /// Key of the worker graph. It includes the incarnation, so that a leaving run and the next try's run have
    /// different keys.
    pub key: GraphKey,
    members: Members,
    pending: Members,
    /// One more than the highest epoch among the rows that have arrived.
    next_epoch: Epoch,
    /// The `Finished` of the rank that reported first. All other ranks must report an equal one.
    pub finished: Option<pb::Finished>,
    /// Number of the request's output tokens when this run began.
    pub tokens_before: usize,
}

impl Run {
    pub fn new(key: GraphKey, members: Members, tokens_before: usize) -> Self {
        Self { key, pending: members.clone(), members, next_epoch: Epoch(0), finished: None, tokens_before }
    }

    pub fn leader(&self) -> Option<WorkerId> {
        self.members.values().next().copied()
    }

    /// Records that a row of this epoch has arrived.
    pub fn see_epoch(&mut self, epoch: u32) {
        self.next_epoch = self.next_epoch.max(Epoch(epoch).next());
    }

    /// True once every rank has completed the graph.
    pub fn is_over(&self) -> bool {
        self.pending.is_empty()
    }

    /// The workers that have not completed the graph, each with the graph's key.
    pub fn holders(&self) -> Vec<(WorkerId, GraphKey)> {
        self.pending.values().map(|worker| (*worker, self.key)).collect()
    }

    /// Removes a rank from the pending ranks, or returns why the rank's completion is dropped.
    pub fn accept_completion(&mut self, from: WorkerId, completion: &pb::Completion) -> Result<(), Dropped> {
        let rank = Rank(completion.rank);
        if self.members.get(&rank) != Some(&from) {
            return Err(Dropped::Unknown);
        }
        if !self.pending.contains_key(&rank) {
            return Err(Dropped::Duplicate);
        }
        let finished = matches!(completion.outcome, Some(pb::completion::Outcome::Finished(_)));
        if finished && Epoch(completion.epoch) < self.next_epoch {
            return Err(Dropped::Stale);
        }
        self.pending.remove(&rank);
        Ok(())
    }

    /// Removes the ranks of a lost worker from the pending ranks. Returns true if the worker had a pending rank.
    pub fn lose(&mut self, worker: WorkerId) -> bool {
        let before = self.pending.len();
        self.pending.retain(|_, holder| *holder != worker);
        self.pending.len() < before
    }
}
