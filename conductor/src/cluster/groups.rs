//! TP groups: how the ranks of one come together, and why they end together.
//!
//! A group is formed once all its ranks have joined: each is told its place in it and where they meet, a place that no
//! earlier group had. Ranks count on each other in every step, so that the end of one is the end of all: what is left of
//! the group is turned away at once, and its processes are started again together. Late messages of theirs find nobody.

use tutti_proto::{
    Rank, WorkerId,
    cluster::v1::{self as pb, conductor_message::Message as ToWorker},
};
use tutti_runtime::Error;

use super::{Cluster, State};

impl Cluster {
    /// Refuses a worker that cannot be in any group.
    pub(super) fn check_group(&self, rank: Rank) -> Result<(), Error> {
        let (tp, spawned) = (self.limits.tp, self.limits.spawned_workers);
        if tp > 1 && rank.0 >= spawned {
            // Ranks meet in the memory of one machine, and where a worker that joins by hand is cannot be known.
            let message = format!(
                "is {rank}, but with a tp of {tp} only the {spawned} workers that the conductor spawns form groups"
            );
            return Err(Error::invalid("rank", message));
        }
        Ok(())
    }

    /// Tells the ranks of a group to meet, if the last one of them has just joined.
    pub(super) fn form_group(&self, state: &mut State, last: Rank) {
        let tp = self.limits.tp;
        let members = state.workers.group_of(last);
        if tp <= 1 || members.len() < tp as usize {
            return;
        }
        state.groups_formed += 1;
        let meeting_place = self.meeting_places.join(format!("group-{}", state.groups_formed));
        let meeting_place = meeting_place.to_string_lossy().into_owned();
        tracing::debug!(ranks = ?members.iter().map(|(rank, _)| rank.0), meeting_place, "group forms");
        for (place, (_, id)) in (0..).zip(members) {
            let meeting_place = meeting_place.clone();
            state
                .workers
                .send(id, ToWorker::FormGroup(pb::FormGroup { rank: place, size: tp, meeting_place }));
        }
    }

    /// Ends what is left of the group of a rank that is gone.
    pub(super) fn disband(&self, state: &mut State, gone: Rank) {
        let left: Vec<WorkerId> = state.workers.group_of(gone).into_iter().map(|(_, id)| id).collect();
        for id in left {
            self.lose(state, id, &format!("worker {gone} of its group is gone"));
        }
    }
}
