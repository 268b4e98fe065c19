//! TP groups: how the ranks of one come together, and why they end together.
//!
//! A group is formed once all its ranks have joined. Ranks that this conductor has spawned are on one machine and meet in
//! its memory; of those that have joined by hand the leader listens, says on which port, and the others dial it. Each
//! group has a meeting place, or a secret, of its own. Ranks count on each other in every step, so that the end of one is
//! the end of all: what is left of the group is turned away at once, and where its processes are this conductor's they
//! are started again. Late messages of theirs find nobody.

use std::net::SocketAddr;

use tutti_proto::{
    Rank, WorkerId,
    cluster::v1::{self as pb, conductor_message::Message as ToWorker, form_group::Meeting},
};

use super::{Cluster, State};

impl Cluster {
    /// Has the ranks of a group meet, if the last one of them has just joined. `secret` is for this group alone.
    pub(super) fn form_group(&self, state: &mut State, last: Rank, secret: [u8; 16]) {
        let tp = self.tp(last);
        let members = state.workers.group_of(last);
        if tp <= 1 || members.len() < tp as usize {
            return;
        }
        if last.0 < self.spawned_workers() {
            state.groups_formed += 1;
            let place = self.meeting_places.join(format!("group-{}", state.groups_formed));
            let place = place.to_string_lossy().into_owned();
            tracing::debug!(?members, place, "group meets");
            for (rank, (_, id)) in (0..).zip(members) {
                self.send_meeting(state, id, rank, Meeting::SharedMemory(place.clone()));
            }
        } else if let Some((_, leader)) = members.first() {
            state.forming.insert(*leader, secret);
            let listen = pb::ListenForGroup { secret: secret.to_vec() };
            self.send_meeting(state, *leader, 0, Meeting::Listen(listen));
        }
    }

    /// The leader of a group whose ranks are apart waits for the others.
    pub fn on_group_listening(&self, leader: WorkerId, port: u32) {
        let mut state = self.state.lock();
        let Some(secret) = state.forming.remove(&leader) else { return };
        let Some((rank, host)) = state.workers.get_mut(leader).map(|worker| (worker.rank, worker.host))
        else {
            return;
        };
        let Ok(port) = u16::try_from(port) else {
            tracing::error!(worker = %rank, port, "listens at what is no port");
            return;
        };
        let address = SocketAddr::new(host, port).to_string();
        let members = state.workers.group_of(rank);
        tracing::debug!(?members, address, "group meets");
        for (rank, (_, id)) in (0..).zip(members).skip(1) {
            let dial = pb::DialLeader { address: address.clone(), secret: secret.to_vec() };
            self.send_meeting(&mut state, id, rank, Meeting::Dial(dial));
        }
    }

    fn send_meeting(&self, state: &mut State, to: WorkerId, rank: u32, meeting: Meeting) {
        let Some(size) = state.workers.get_mut(to).map(|worker| self.tp(worker.rank)) else { return };
        let form = pb::FormGroup { rank, size, meeting: Some(meeting) };
        state.workers.send(to, ToWorker::FormGroup(form));
    }

    /// Ranks of this rank's group.
    pub(super) fn tp(&self, rank: Rank) -> u32 {
        self.limits.topology.replica_of(rank).map_or(1, |replica| replica.tp)
    }

    /// Ends what is left of the group of a rank that is gone. Where that rank did not go of its own will, the others may be
    /// waiting for it and hear nothing: they are fenced.
    pub(super) fn disband(&self, state: &mut State, gone: Rank, fenced: bool) {
        let left: Vec<WorkerId> = state.workers.group_of(gone).into_iter().map(|(_, id)| id).collect();
        for id in left {
            self.lose(state, id, &format!("worker {gone} of its group is gone"), fenced);
        }
    }
}
