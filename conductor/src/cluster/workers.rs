//! The joined workers: their groups and roles, and the messages to them.

mod bookings;
mod worker;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::sync::mpsc;
use tutti_proto::{
    GraphKey, Rank, WorkerId,
    cluster::v1::{self as pb, conductor_message::Message as ToWorker},
};

pub use self::{
    bookings::{Activity, Booking},
    worker::{Joining, Link, Worker},
};
use super::{
    roles::{Duties, GroupRole},
    topology::{Replica, Topology},
};
use crate::request::Members;

/// All joined workers.
#[derive(Debug, Default)]
pub struct Workers {
    by_id: BTreeMap<WorkerId, Worker>,
    next: u32,
    topology: Topology,
    /// Roles of each group; empty until a model is known.
    duties: Vec<Duties>,
    /// The watchdog's clock: the sum of its ticks.
    now: Duration,
}

impl Workers {
    /// Creates an empty set of workers, for the groups of this topology.
    pub fn new(topology: Topology) -> Self {
        Self { topology, ..Self::default() }
    }

    /// The time on the watchdog's clock, since the start.
    pub fn now(&self) -> Duration {
        self.now
    }

    /// Lets time pass on the watchdog's clock.
    pub fn pass(&mut self, time: Duration) {
        self.now += time;
    }

    /// Number of ranks of a rank's replica, joined or not.
    pub fn ranks_of(&self, rank: Rank) -> u32 {
        self.topology.replica_of(rank).map_or(1, |replica| replica.tp)
    }

    /// True if a graph has been in a step of its worker, or is not there.
    pub fn has_begun(&self, id: WorkerId, key: GraphKey) -> bool {
        self.get(id).is_none_or(|worker| worker.bookings.has_begun(key))
    }

    /// Sets the roles of each group.
    pub fn set_roles(&mut self, duties: Vec<impl Into<Duties>>) {
        self.duties = duties.into_iter().map(Into::into).collect();
    }

    /// Roles of this rank's group; none until a model is known.
    pub fn duties(&self, rank: Rank) -> Duties {
        let group = self.topology.group_of(rank).and_then(|group| self.duties.get(group));
        group.copied().unwrap_or_default()
    }

    /// True if some group has this role.
    pub fn has_role(&self, role: GroupRole) -> bool {
        self.duties.iter().any(|duties| duties.include(role))
    }

    /// Adds a worker under an id that no earlier worker had.
    pub fn join(&mut self, joining: Joining, link: Link) -> WorkerId {
        let id = WorkerId(self.next);
        self.next += 1;
        self.by_id.insert(id, Worker::new(joining, link));
        id
    }

    pub fn remove(&mut self, id: WorkerId) -> Option<Worker> {
        self.by_id.remove(&id)
    }

    pub fn get(&self, id: WorkerId) -> Option<&Worker> {
        self.by_id.get(&id)
    }

    /// Roles of a worker's group; none if the worker is gone.
    pub fn duties_of(&self, id: WorkerId) -> Duties {
        self.get(id).map(|worker| self.duties(worker.rank)).unwrap_or_default()
    }

    pub fn get_mut(&mut self, id: WorkerId) -> Option<&mut Worker> {
        self.by_id.get_mut(&id)
    }

    /// Records that a message of this worker has arrived, which ends its silence. Returns the worker if it is present.
    pub fn hear(&mut self, id: WorkerId) -> Option<&mut Worker> {
        let worker = self.by_id.get_mut(&id)?;
        worker.silent = Duration::ZERO;
        Some(worker)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (WorkerId, &mut Worker)> {
        self.by_id.iter_mut().map(|(id, worker)| (*id, worker))
    }

    pub fn iter(&self) -> impl Iterator<Item = (WorkerId, &Worker)> {
        self.by_id.iter().map(|(id, worker)| (*id, worker))
    }

    pub fn by_rank(&self, rank: Rank) -> Option<(WorkerId, &Worker)> {
        self.iter().find(|(_, worker)| worker.rank == rank)
    }

    /// The joined workers of this rank's replica, in order of rank.
    pub fn group_of(&self, rank: Rank) -> Vec<(Rank, WorkerId)> {
        let replica = self.topology.replica_of(rank);
        let members = self.iter().filter(|(_, worker)| self.topology.replica_of(worker.rank) == replica);
        let mut members: Vec<_> = members.map(|(id, worker)| (worker.rank, id)).collect();
        members.sort_unstable();
        members
    }

    fn is_leader(&self, rank: Rank) -> bool {
        self.topology.replica_of(rank).is_some_and(|replica| replica.leader == rank)
    }

    /// True if a worker is a follower whose leader is present. Such a follower ends with its leader and needs no
    /// `Drain` message.
    pub fn leaves_with_its_leader(&self, id: WorkerId) -> bool {
        let Some(worker) = self.by_id.get(&id).filter(|worker| !self.is_leader(worker.rank)) else {
            return false;
        };
        self.group_of(worker.rank).first().is_some_and(|(first, _)| self.is_leader(*first))
    }

    /// Workers that have loaded the model.
    pub fn loaded(&self) -> impl Iterator<Item = (WorkerId, &Worker)> {
        self.iter().filter(|(_, w)| w.phase == pb::WorkerPhase::Ready && w.link.is_some())
    }

    /// Workers that take requests. These are the leaders of all replicas whose ranks have all loaded the model.
    pub fn ready(&self) -> impl Iterator<Item = (WorkerId, &Worker)> {
        let mut loaded: BTreeMap<Replica, u32> = BTreeMap::new();
        for (_, worker) in self.loaded() {
            if let Some(replica) = self.topology.replica_of(worker.rank) {
                *loaded.entry(replica).or_default() += 1;
            }
        }
        self.loaded().filter(move |(_, worker)| {
            let replica = self.topology.replica_of(worker.rank);
            replica.is_some_and(|replica| {
                replica.leader == worker.rank && loaded.get(&replica) == Some(&replica.tp)
            })
        })
    }

    /// Workers that take requests and whose group has this role.
    pub fn ready_for(&self, role: GroupRole) -> impl Iterator<Item = (WorkerId, &Worker)> {
        self.ready().filter(move |(_, worker)| self.duties(worker.rank).include(role))
    }

    /// True if prefix locality can affect placement: at least two joined replicas prefill, or at least two only decode.
    /// A replica that runs whole requests prefills, too.
    pub fn have_choice(&self) -> bool {
        let mut seen = BTreeSet::new();
        let leaders = self.iter().filter(|(_, worker)| self.is_leader(worker.rank));
        let thinkers = leaders.filter_map(|(_, worker)| self.duties(worker.rank).thinks);
        let mut decodes = thinkers.map(|role| role == GroupRole::Decode);
        decodes.any(|decodes| !seen.insert(decodes))
    }

    /// Sends a launch to all members of a graph, and books the graph's load on each of them.
    pub fn launch(
        &mut self,
        members: Members,
        booking: Booking,
        activity: Activity,
        launch: pb::LaunchGraph,
    ) {
        let key = GraphKey::from(launch.key.unwrap_or_default());
        let mut workers: Vec<WorkerId> = members.into_values().collect();
        // The last worker gets the message itself, not a clone: most graphs have one worker, and prompts may be long.
        let last = workers.pop();
        for worker in workers {
            self.book(worker, key, booking, activity);
            self.send(worker, ToWorker::Launch(launch.clone()));
        }
        if let Some(worker) = last {
            self.book(worker, key, booking, activity);
            self.send(worker, ToWorker::Launch(launch));
        }
    }

    /// Adds a graph to its worker's load.
    pub fn book(&mut self, id: WorkerId, key: GraphKey, booking: Booking, activity: Activity) {
        if let Some(worker) = self.by_id.get_mut(&id)
            && worker.bookings.add(key, booking)
            && activity == Activity::Active
        {
            worker.activate(key);
        }
    }

    /// Makes a resting graph active.
    pub fn activate(&mut self, id: WorkerId, key: GraphKey) {
        if let Some(worker) = self.by_id.get_mut(&id) {
            worker.activate(key);
        }
    }

    /// Records that a graph has been in a step.
    pub fn begin(&mut self, id: WorkerId, key: GraphKey) {
        if let Some(worker) = self.by_id.get_mut(&id) {
            worker.bookings.begin(key);
        }
    }

    /// Books a graph as decoding; see [`bookings::Bookings::set_decoding`].
    pub fn set_decoding(&mut self, id: WorkerId, key: GraphKey, blocks: u64) {
        if let Some(worker) = self.by_id.get_mut(&id) {
            worker.bookings.set_decoding(key, blocks);
        }
    }

    /// Removes a completed graph from its worker's load. Returns true if this makes room for another graph, and false
    /// if the worker is lost or did not hold the graph.
    pub fn release(&mut self, id: WorkerId, key: GraphKey) -> bool {
        self.by_id.get_mut(&id).is_some_and(|worker| worker.bookings.remove(key))
    }

    /// Tells every worker to leave. A follower whose leader is present gets no message: it leaves with its leader.
    pub fn dismiss(&mut self) {
        let ids: Vec<WorkerId> = self.by_id.keys().copied().collect();
        for id in ids {
            if !self.leaves_with_its_leader(id) {
                self.send(id, ToWorker::Drain(pb::Drain {}));
            }
            if let Some(worker) = self.by_id.get_mut(&id) {
                worker.phase = pb::WorkerPhase::Draining;
            }
        }
    }

    /// Sends a message without waiting. If the link is full, the message is lost, and the worker is turned away,
    /// because it must not go on without the message.
    pub fn send(&mut self, id: WorkerId, message: ToWorker) {
        let Some(worker) = self.by_id.get_mut(&id) else { return };
        let Some(link) = &worker.link else { return };
        if let Err(error) = link.try_send(Ok(pb::ConductorMessage { message: Some(message) })) {
            if matches!(error, mpsc::error::TrySendError::Full(_)) {
                tracing::error!(worker = worker.rank.0, "the worker takes no messages; turning it away");
            }
            worker.link = None;
        }
    }
}
