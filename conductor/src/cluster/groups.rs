//! Formation of TP groups. A TP group consists of the ranks of one replica. These ranks start and end at the same time.
//!
//! A TP group is formed once all its ranks have joined. First the conductor sends the leader the meeting point. After
//! the leader has answered, the conductor sends the meeting point to the other ranks. Ranks that this conductor has
//! spawned are on one machine and meet in shared memory. Among ranks that have joined by hand, the leader listens and
//! reports its port, and the other ranks dial that port. The leader of a group of GPUs also reports the id by which
//! NCCL finds the ranks. Each TP group has its own meeting path or secret. Every step needs every rank, so the end of
//! one rank ends the group. The remaining ranks are removed at once, and spawned ranks are started again. Late messages
//! of a group that has ended are dropped.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf};

use tutti_proto::{
    Rank, WorkerId,
    cluster::v1::{self as pb, conductor_message::Message as ToWorker, form_group::Meeting},
};

use tutti_runtime::Error;

use super::membership::Membership;

/// Meeting paths and secrets of TP groups.
#[derive(Debug)]
pub struct GroupFormation {
    /// Directory of the meeting paths.
    directory: PathBuf,
    /// Number of groups that have met in shared memory so far. The count gives each group a path of its own.
    formed: u64,
    /// The meeting point of each TP group whose leader has not yet answered, by leader.
    points: BTreeMap<WorkerId, MeetingPoint>,
}

/// The point at which the ranks of a TP group meet.
#[derive(Debug)]
enum MeetingPoint {
    /// Path of a file in shared memory.
    SharedMemory(String),
    /// The leader's port, where the other ranks present this secret.
    Leader([u8; 16]),
}

impl Default for GroupFormation {
    fn default() -> Self {
        Self { directory: std::env::temp_dir(), formed: 0, points: BTreeMap::new() }
    }
}

impl GroupFormation {
    pub fn meet_in(&mut self, directory: PathBuf) {
        self.directory = directory;
    }

    /// Forgets the meeting point of a leader that is gone.
    pub fn forget(&mut self, leader: WorkerId) {
        self.points.remove(&leader);
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
        let Some(&(_, leader)) = members.first() else { return };
        if !self.must_meet(&members) {
            return;
        }
        let (point, meeting) = if last.0 < self.spawned_workers() {
            self.groups.formed += 1;
            let path = self.groups.directory.join(format!("group-{}", self.groups.formed));
            let path = path.to_string_lossy().into_owned();
            (MeetingPoint::SharedMemory(path.clone()), Meeting::SharedMemory(path))
        } else {
            let listen = pb::ListenForGroup { secret: secret.to_vec() };
            (MeetingPoint::Leader(secret), Meeting::Listen(listen))
        };
        self.groups.points.insert(leader, point);
        self.send_meeting(leader, 0, meeting, Vec::new());
    }

    /// True if the members of a complete group have not met yet. A group that has outlived its conductor has met, and
    /// its ranks say where. If it has lost a rank, its other ranks are turned away, because they cannot meet again.
    fn must_meet(&mut self, members: &[(Rank, WorkerId)]) -> bool {
        let path = |id: &WorkerId| self.workers.get(*id).map_or("", |worker| &worker.meeting_path);
        let paths: Vec<_> = members.iter().map(|(_, id)| path(id)).collect();
        let is_whole = paths.iter().all(|path| *path == paths[0]);
        if is_whole {
            return paths[0].is_empty();
        }
        let has_met: Vec<bool> = paths.iter().map(|path| !path.is_empty()).collect();
        for ((_, id), _) in members.iter().zip(has_met).filter(|(_, has_met)| *has_met) {
            if let Some(worker) = self.workers.get_mut(*id) {
                worker.turn_away(Error::internal("a rank of its group was lost with the conductor"));
            }
        }
        false
    }

    /// Tells the other ranks of a group where to meet, after the group's leader has answered.
    pub(super) fn meet_leader(&mut self, leader: WorkerId, listening: pb::GroupListening) {
        let Some(point) = self.groups.points.remove(&leader) else { return };
        let Some((rank, host)) = self.workers.get_mut(leader).map(|worker| (worker.rank, worker.host)) else {
            return;
        };
        let pb::GroupListening { port, nccl_id } = listening;
        let meeting = match point {
            MeetingPoint::SharedMemory(path) => Meeting::SharedMemory(path),
            MeetingPoint::Leader(secret) => {
                let Ok(port) = u16::try_from(port) else {
                    tracing::error!(worker = rank.0, port, "the leader of a group reports an invalid port");
                    return;
                };
                let address = SocketAddr::new(host, port).to_string();
                Meeting::Dial(pb::DialLeader { address, secret: secret.to_vec() })
            }
        };
        let members = self.workers.group_of(rank);
        tracing::debug!(?members, gpus = !nccl_id.is_empty(), "group meets");
        for (rank, (_, id)) in (0..).zip(members).skip(1) {
            self.send_meeting(id, rank, meeting.clone(), nccl_id.clone());
        }
    }

    fn send_meeting(&mut self, to: WorkerId, rank: u32, meeting: Meeting, nccl_id: Vec<u8>) {
        let Some(member) = self.workers.get_mut(to).map(|worker| worker.rank) else { return };
        let size = self.limits.topology.tp_of(member);
        let form = pb::FormGroup { rank, size, meeting: Some(meeting), nccl_id };
        self.workers.send(to, ToWorker::FormGroup(form));
    }
}
