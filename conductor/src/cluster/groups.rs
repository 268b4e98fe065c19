//! Formation of TP groups. A TP group consists of the ranks of one replica. These ranks start together and end
//! together.
//!
//! A TP group is formed once all its ranks have joined. Ranks that this conductor has spawned are on one machine and
//! meet in shared memory. Among ranks that have joined by hand, the leader listens and reports its port, and the other
//! ranks dial that port. Each TP group has its own meeting path or secret. Every step needs every rank, so the end of
//! one rank ends the group: the remaining ranks are removed at once, and spawned ranks are started again. Late messages
//! of a group that has ended are dropped.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf};

use tutti_proto::{
    Rank, WorkerId,
    cluster::v1::{self as pb, conductor_message::Message as ToWorker, form_group::Meeting},
};

use super::membership::Membership;

/// Meeting paths and secrets of TP groups.
#[derive(Debug)]
pub struct GroupFormation {
    /// Directory of the meeting paths.
    directory: PathBuf,
    /// Number of groups that have met in shared memory so far. The count gives each group a path of its own.
    formed: u64,
    /// Secret of each TP group whose leader has not yet reported its port, by leader.
    secrets: BTreeMap<WorkerId, [u8; 16]>,
}

impl Default for GroupFormation {
    fn default() -> Self {
        Self { directory: std::env::temp_dir(), formed: 0, secrets: BTreeMap::new() }
    }
}

impl GroupFormation {
    pub fn meet_in(&mut self, directory: PathBuf) {
        self.directory = directory;
    }

    /// Forgets the secret of a leader that is gone.
    pub fn forget(&mut self, leader: WorkerId) {
        self.secrets.remove(&leader);
    }
}

impl Membership {
    /// Forms the TP group of rank `last`, which has just joined, if the group is now complete. `secret` is used for
    /// this group only.
    pub(super) fn form_group(&mut self, last: Rank, secret: [u8; 16]) {
        let tp = self.limits.topology.tp_of(last);
        let members = self.workers.group_of(last);
        if tp <= 1 || members.len() < tp as usize {
            return;
        }
        if last.0 < self.spawned_workers() {
            self.groups.formed += 1;
            let path = self.groups.directory.join(format!("group-{}", self.groups.formed));
            let path = path.to_string_lossy().into_owned();
            tracing::debug!(?members, path, "group meets");
            for (rank, (_, id)) in (0..).zip(members) {
                self.send_meeting(id, rank, Meeting::SharedMemory(path.clone()));
            }
        } else if let Some((_, leader)) = members.first() {
            self.groups.secrets.insert(*leader, secret);
            let listen = pb::ListenForGroup { secret: secret.to_vec() };
            self.send_meeting(*leader, 0, Meeting::Listen(listen));
        }
    }

    /// Tells the other ranks of a group to dial their leader, which listens on `port`.
    pub(super) fn dial_leader(&mut self, leader: WorkerId, port: u32) {
        let Some(secret) = self.groups.secrets.remove(&leader) else { return };
        let Some((rank, host)) = self.workers.get_mut(leader).map(|worker| (worker.rank, worker.host)) else {
            return;
        };
        let Ok(port) = u16::try_from(port) else {
            tracing::error!(worker = %rank, port, "the leader of a group reports an invalid port");
            return;
        };
        let address = SocketAddr::new(host, port).to_string();
        let members = self.workers.group_of(rank);
        tracing::debug!(?members, address, "group meets");
        for (rank, (_, id)) in (0..).zip(members).skip(1) {
            let dial = pb::DialLeader { address: address.clone(), secret: secret.to_vec() };
            self.send_meeting(id, rank, Meeting::Dial(dial));
        }
    }

    fn send_meeting(&mut self, to: WorkerId, rank: u32, meeting: Meeting) {
        let Some(member) = self.workers.get_mut(to).map(|worker| worker.rank) else { return };
        let size = self.limits.topology.tp_of(member);
        let form = pb::FormGroup { rank, size, meeting: Some(meeting) };
        self.workers.send(to, ToWorker::FormGroup(form));
    }
}
