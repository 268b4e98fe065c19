//! One worker graph at its workers, from its launch until all of them have let go of it.

use std::collections::BTreeMap;

use tutti_proto::{Epoch, GraphKey, Rank, WorkerId, cluster::v1 as pb};

use super::Dropped;

/// The ranks that run a worker graph, each on its worker. The lowest rank leads: its rows carry the tokens.
pub type Members = BTreeMap<Rank, WorkerId>;

/// Who runs a graph, and who still does.
#[derive(Debug)]
pub(super) struct Run {
    /// Names the try, so that a run that is over for its client is still told from the next.
    pub key: GraphKey,
    members: Members,
    pending: Members,
    /// The pass after the last one that a row was seen of.
    next_epoch: Epoch,
    /// What the first rank to finish said; the others must say the same.
    pub finished: Option<pb::Finished>,
    /// Tokens that were there when it began.
    pub had: usize,
}

impl Run {
    pub fn new(key: GraphKey, members: Members, had: usize) -> Self {
        Self { key, pending: members.clone(), members, next_epoch: Epoch(0), finished: None, had }
    }

    pub fn leader(&self) -> Option<WorkerId> {
        self.members.values().next().copied()
    }

    /// A row of this pass has come.
    pub fn see_epoch(&mut self, epoch: u32) {
        self.next_epoch = self.next_epoch.max(Epoch(epoch).next());
    }

    /// Whether every rank has let go.
    pub fn is_over(&self) -> bool {
        self.pending.is_empty()
    }

    /// The workers that have not let go, each with the graph's name.
    pub fn holders(&self) -> Vec<(WorkerId, GraphKey)> {
        self.pending.values().map(|worker| (*worker, self.key)).collect()
    }

    /// Takes a rank's word that it has let go; why not, where it has not been waited for.
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

    /// A worker is gone; whether it held anything of this.
    pub fn lose(&mut self, worker: WorkerId) -> bool {
        let before = self.pending.len();
        self.pending.retain(|_, holder| *holder != worker);
        self.pending.len() < before
    }
}
