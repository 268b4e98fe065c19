//! The workers as the conductor sees them: who is joined, who is ready, who has the least to do.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::Entry},
    net::IpAddr,
    time::Duration,
};

use tokio::sync::mpsc;
use tonic::Status;
use tutti_proto::{GraphKey, Rank, RequestId, WorkerId, cluster::v1 as pb};
use tutti_runtime::Error;

use super::{
    placement::Placement,
    roles::{Duties, GroupRole},
    topology::{Replica, Topology},
};
use crate::request::{GraphRole, Request};

/// The way to one worker. Bounded so that it cannot fill while the conductor's own limits hold: each try of a request in
/// flight is launched and cancelled at most once on a worker.
pub type Link = mpsc::Sender<Result<pb::ConductorMessage, Status>>;

/// One life of a worker, from its Hello to the end of its stream.
#[derive(Debug)]
pub struct Worker {
    pub rank: Rank,
    pub pid: u32,
    /// Where it dials from.
    pub host: IpAddr,
    pub phase: pb::WorkerPhase,
    pub load: pb::WorkerLoad,
    /// Since Ready.
    pub model: Option<pb::ModelDescription>,
    /// `None` once the worker is turned away: its stream ends, and with it the worker.
    pub link: Option<Link>,
    /// As of its last heartbeat.
    forwards: u64,
    /// How long nothing has come from it.
    pub silent: Duration,
    /// How long it has had work and nothing has come of it.
    pub stuck: Duration,
    /// What is there, by graph.
    graphs: HashMap<GraphKey, Held>,
    /// Those of them that wait for another worker.
    resting: usize,
    /// Their sum.
    pub booked: Booking,
    /// Graphs sent there so far.
    pub launched: u64,
}

impl Worker {
    /// The requests that it has something of.
    pub fn requests(&self) -> BTreeSet<RequestId> {
        self.graphs.keys().map(|key| key.request).collect()
    }

    /// Whether something was sent there that is not over.
    #[cfg(test)]
    pub fn holds_any(&self) -> bool {
        !self.graphs.is_empty()
    }

    /// Whether steps are to be expected of it.
    pub fn has_work(&self) -> bool {
        self.graphs.len() > self.resting
    }

    fn wake(&mut self, key: GraphKey) {
        if !self.has_work() {
            self.stuck = Duration::ZERO;
        }
        if let Some(held) = self.graphs.get_mut(&key).filter(|held| held.resting) {
            held.resting = false;
            self.resting -= 1;
        }
    }

    /// Its own count, in which progress shows.
    pub fn take_heartbeat(&mut self, beat: &pb::Heartbeat) {
        let load = beat.load.unwrap_or_default();
        if (load.steps, beat.forwards) != (self.load.steps, self.forwards) {
            self.stuck = Duration::ZERO;
        }
        (self.load, self.forwards) = (load, beat.forwards);
    }

    /// Ends its stream and says why. What it says from here on counts for nothing that it is not told of.
    pub fn turn_away(&mut self, why: Error) {
        if let Some(link) = self.link.take() {
            // A link without room is one that nobody reads.
            let _ = link.try_send(Err(why.into()));
        }
    }

    /// What the worker's model calls this walk.
    pub fn walk_name(&self, walk: u32) -> &str {
        let declaration = self.model.as_ref().and_then(|model| model.declaration.as_ref());
        let walk = declaration.and_then(|declaration| declaration.walks.get(walk as usize));
        walk.map_or("undeclared", |walk| &walk.name)
    }
}

/// What a worker graph takes of a worker while it is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Booking {
    pub requests: u64,
    /// Prompt blocks yet to be computed.
    pub queued_blocks: u64,
    /// Blocks of what decodes, or waits for it with all of its prompt computed.
    pub active_blocks: u64,
    /// Requests that may be what brings their workers down.
    pub suspects: u64,
}

impl Booking {
    /// This part of this request, where it goes.
    pub fn of(request: &Request, placement: &Placement) -> Self {
        let blocks = request.blocks();
        let (queued_blocks, active_blocks) = match placement.role {
            GraphRole::Whole | GraphRole::Prefill => (blocks.saturating_sub(placement.cached), 0),
            GraphRole::Decode => (0, blocks),
            GraphRole::Encode => (request.media_blocks(), 0),
        };
        Self { requests: 1, queued_blocks, active_blocks, suspects: request.is_suspect().into() }
    }

    /// What a request that comes now has to wait for, or to share each step with.
    pub fn blocks(&self) -> u64 {
        self.queued_blocks + self.active_blocks
    }

    fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.queued_blocks += other.queued_blocks;
        self.active_blocks += other.active_blocks;
        self.suspects += other.suspects;
    }

    /// Only what was added is ever taken away.
    fn take(&mut self, other: Self) {
        self.requests -= other.requests;
        self.queued_blocks -= other.queued_blocks;
        self.active_blocks -= other.active_blocks;
        self.suspects -= other.suspects;
    }
}

/// A graph where it is.
#[derive(Clone, Copy, Debug)]
struct Held {
    booking: Booking,
    /// It waits for what another worker computes, and brings no steps until then.
    resting: bool,
}

/// All joined workers.
#[derive(Debug, Default)]
pub struct Workers {
    by_id: BTreeMap<WorkerId, Worker>,
    next: u32,
    topology: Topology,
    /// Of each group; empty until a model is known.
    duties: Vec<Duties>,
}

impl Workers {
    /// None yet.
    pub fn of(topology: Topology) -> Self {
        Self { topology, ..Self::default() }
    }

    /// What each group is for.
    pub fn take_roles(&mut self, duties: Vec<impl Into<Duties>>) {
        self.duties = duties.into_iter().map(Into::into).collect();
    }

    /// What this rank's group is for, once that is known.
    pub fn duties(&self, rank: Rank) -> Duties {
        let group = self.topology.replica_of(rank).and_then(|replica| self.duties.get(replica.group));
        group.copied().unwrap_or_default()
    }

    /// Whether some group is for this.
    pub fn has_role(&self, role: GroupRole) -> bool {
        self.duties.iter().any(|duties| duties.include(role))
    }

    /// Takes in a worker that said Hello and gives it a name that no earlier one had.
    pub fn join(&mut self, rank: Rank, pid: u32, host: IpAddr, link: Link) -> WorkerId {
        let id = WorkerId(self.next);
        self.next += 1;
        let worker = Worker {
            rank,
            pid,
            host,
            phase: pb::WorkerPhase::Starting,
            load: pb::WorkerLoad::default(),
            model: None,
            link: Some(link),
            forwards: 0,
            silent: Duration::ZERO,
            stuck: Duration::ZERO,
            graphs: HashMap::new(),
            resting: 0,
            booked: Booking::default(),
            launched: 0,
        };
        self.by_id.insert(id, worker);
        id
    }

    pub fn remove(&mut self, id: WorkerId) -> Option<Worker> {
        self.by_id.remove(&id)
    }

    pub fn get_mut(&mut self, id: WorkerId) -> Option<&mut Worker> {
        self.by_id.get_mut(&id)
    }

    /// The one that has just said something.
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

    /// Those of this rank's replica that are here, in order of rank.
    pub fn group_of(&self, rank: Rank) -> Vec<(Rank, WorkerId)> {
        let replica = self.topology.replica_of(rank);
        let mates = self.iter().filter(|(_, worker)| self.topology.replica_of(worker.rank) == replica);
        let mut mates: Vec<_> = mates.map(|(id, worker)| (worker.rank, id)).collect();
        mates.sort_unstable();
        mates
    }

    fn leads(&self, rank: Rank) -> bool {
        self.topology.replica_of(rank).is_some_and(|replica| replica.leader == rank)
    }

    /// Whether a worker need not be told to go, since it ends when the leader of its group has gone.
    pub fn leaves_with_its_leader(&self, id: WorkerId) -> bool {
        let Some(worker) = self.by_id.get(&id).filter(|worker| !self.leads(worker.rank)) else {
            return false;
        };
        self.group_of(worker.rank).first().is_some_and(|(first, _)| self.leads(*first))
    }

    /// Those that have loaded.
    pub fn loaded(&self) -> impl Iterator<Item = (WorkerId, &Worker)> {
        self.iter().filter(|(_, w)| w.phase == pb::WorkerPhase::Ready && w.link.is_some())
    }

    /// Those that take requests: the leaders of replicas that have loaded as a whole.
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

    /// Those of them whose group is for this.
    pub fn ready_for(&self, role: GroupRole) -> impl Iterator<Item = (WorkerId, &Worker)> {
        self.ready().filter(move |(_, worker)| self.duties(worker.rank).include(role))
    }

    /// Whether any part of a request that prompts matter to could go to more than one of those that are here, ready or not.
    pub fn have_choice(&self) -> bool {
        let mut seen = BTreeSet::new();
        let leaders = self.iter().filter(|(_, worker)| self.leads(worker.rank));
        let thinkers = leaders.filter_map(|(_, worker)| self.duties(worker.rank).thinks);
        let mut decodes = thinkers.map(|role| role == GroupRole::Decode);
        decodes.any(|decodes| !seen.insert(decodes))
    }

    /// Counts a graph that was sent there. One that is `resting` waits for another worker.
    pub fn book(&mut self, id: WorkerId, key: GraphKey, booking: Booking, resting: bool) {
        if let Some(worker) = self.by_id.get_mut(&id)
            && let Entry::Vacant(vacant) = worker.graphs.entry(key)
        {
            vacant.insert(Held { booking, resting: true });
            worker.resting += 1;
            worker.booked.add(booking);
            worker.launched += 1;
            if !resting {
                worker.wake(key);
            }
        }
    }

    /// From here on, steps are to be expected of this graph.
    pub fn wake(&mut self, id: WorkerId, key: GraphKey) {
        if let Some(worker) = self.by_id.get_mut(&id) {
            worker.wake(key);
        }
    }

    /// Tokens have come of this graph: its prompt is computed, and with its output it has so many blocks.
    pub fn decodes(&mut self, id: WorkerId, key: GraphKey, blocks: u64) {
        let Some(worker) = self.by_id.get_mut(&id) else { return };
        let Some(held) = worker.graphs.get_mut(&key) else { return };
        let booking = Booking { queued_blocks: 0, active_blocks: blocks, ..held.booking };
        worker.booked.take(std::mem::replace(&mut held.booking, booking));
        worker.booked.add(booking);
    }

    /// Counts a graph that is over there. Whether that makes room: a worker that is gone has none.
    pub fn release(&mut self, id: WorkerId, key: GraphKey) -> bool {
        let Some(worker) = self.by_id.get_mut(&id) else { return false };
        let Some(held) = worker.graphs.remove(&key) else { return false };
        worker.resting -= usize::from(held.resting);
        worker.booked.take(held.booking);
        true
    }

    /// Sends, without waiting. A worker that cannot be told something is turned away: nothing it says later counts on
    /// what it was not told.
    pub fn send(&mut self, id: WorkerId, message: pb::conductor_message::Message) {
        let Some(worker) = self.by_id.get_mut(&id) else { return };
        let Some(link) = &worker.link else { return };
        if let Err(error) = link.try_send(Ok(pb::ConductorMessage { message: Some(message) })) {
            if matches!(error, mpsc::error::TrySendError::Full(_)) {
                tracing::error!(worker = %worker.rank, "takes no messages; turning it away");
            }
            worker.link = None;
        }
    }
}
