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
    roles::Role,
    topology::{Replica, Topology},
};
use crate::request::{Part, Placement, Request};

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
    booked: Booking,
    launched: u64,
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Booking {
    pub requests: u64,
    /// Prompt and output.
    pub tokens: u64,
    /// Requests that may be what brings their workers down.
    pub suspects: u64,
}

impl Booking {
    /// One graph of this request.
    pub fn of(request: &Request) -> Self {
        let spec = request.spec();
        let output = spec.stopping.as_ref().map_or(0, |stopping| u64::from(stopping.max_tokens));
        let suspects = u64::from(request.is_suspect());
        Self { requests: 1, tokens: spec.prompt.len() as u64 + output, suspects }
    }

    fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.tokens += other.tokens;
        self.suspects += other.suspects;
    }

    /// Only what was added is ever taken away.
    fn take(&mut self, other: Self) {
        self.requests -= other.requests;
        self.tokens -= other.tokens;
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
    roles: Vec<Role>,
}

impl Workers {
    /// None yet.
    pub fn of(topology: Topology) -> Self {
        Self { topology, ..Self::default() }
    }

    /// What each group is for.
    pub fn take_roles(&mut self, roles: Vec<Role>) {
        self.roles = roles;
    }

    /// What this rank's group is for, once that is known.
    pub fn role(&self, rank: Rank) -> Option<Role> {
        self.roles.get(self.topology.replica_of(rank)?.group).copied()
    }

    /// Whether some group is for this.
    pub fn has_role(&self, role: Role) -> bool {
        self.roles.contains(&role)
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
    pub fn ready_for(&self, role: Role) -> impl Iterator<Item = (WorkerId, &Worker)> {
        self.ready().filter(move |(_, worker)| self.role(worker.rank) == Some(role))
    }

    /// Of those, the one with the fewest requests, then the fewest tokens, then the fewest launches so far. A suspect goes
    /// only where no other one is.
    fn least_loaded(&self, role: Role, suspect: bool) -> Option<(WorkerId, &Worker)> {
        self.ready_for(role)
            .filter(|(_, worker)| !suspect || worker.booked.suspects == 0)
            .min_by_key(|(_, worker)| (worker.booked, worker.launched))
    }

    /// Where a request begins that may or may not have something to decode: as a whole, with a prefill that nothing
    /// follows, or with the room for its decode, which needs somebody to do the prefill. Of a group it is the leader's
    /// alone: the other ranks do as it says and hold nothing of a request, so that its word that a graph is over is the
    /// group's.
    pub fn place(&self, may_decode: bool, suspect: bool) -> Option<(Part, Placement)> {
        let whole = self.least_loaded(Role::Whole, suspect).map(|at| (Part::Whole, at));
        let prefill = self.least_loaded(Role::Prefill, suspect);
        let apart = if may_decode {
            let decode = prefill.and_then(|_| self.least_loaded(Role::Decode, suspect));
            decode.map(|at| (Part::Decode, at))
        } else {
            prefill.map(|at| (Part::Prefill, at))
        };
        let (part, (id, worker)) =
            whole.into_iter().chain(apart).min_by_key(|(_, (_, worker))| (worker.booked, worker.launched))?;
        Some((part, Placement::from([(worker.rank, id)])))
    }

    /// Where the prefill of a request goes whose decode has its room.
    pub fn place_prefill(&self, suspect: bool) -> Option<Placement> {
        let (id, worker) = self.least_loaded(Role::Prefill, suspect)?;
        Some(Placement::from([(worker.rank, id)]))
    }

    /// Counts a graph that was sent there. One that is `resting` waits for another worker.
    pub fn book(&mut self, id: WorkerId, key: GraphKey, booking: Booking, resting: bool) {
        if let Some(worker) = self.by_id.get_mut(&id)
            && let Entry::Vacant(place) = worker.graphs.entry(key)
        {
            place.insert(Held { booking, resting: true });
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

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn whole(tp: u32) -> Workers {
        let mut workers = Workers::of(Topology::all_in_one(tp, tp));
        workers.take_roles(vec![Role::Whole]);
        workers
    }

    fn ready(workers: &mut Workers, rank: u32) -> WorkerId {
        let id = workers.join(Rank(rank), 1, HERE, mpsc::channel(1).0);
        workers.get_mut(id).unwrap().phase = pb::WorkerPhase::Ready;
        id
    }

    fn chosen(workers: &Workers) -> Rank {
        *workers.place(true, false).unwrap().1.keys().next().unwrap()
    }

    fn key(request: u64) -> GraphKey {
        pb::GraphKey { request, ..Default::default() }.into()
    }

    #[test]
    fn the_least_loaded_ready_worker_is_chosen_and_ties_go_round() {
        let mut workers = whole(1);
        assert_eq!(workers.place(true, false), None);
        let (a, b) = (ready(&mut workers, 0), ready(&mut workers, 1));
        let booking = Booking { requests: 1, tokens: 10, suspects: 0 };
        assert_eq!(chosen(&workers), Rank(0));
        workers.book(a, key(1), booking, false);
        assert_eq!(chosen(&workers), Rank(1));
        workers.book(b, key(2), Booking { tokens: 5, ..booking }, false);
        assert_eq!(chosen(&workers), Rank(1));
        workers.release(a, key(1));
        workers.release(a, key(1));
        workers.release(b, key(2));
        workers.book(a, key(3), booking, false);
        workers.release(a, key(3));
        assert_eq!(chosen(&workers), Rank(1));
        workers.get_mut(b).unwrap().phase = pb::WorkerPhase::Draining;
        assert_eq!(chosen(&workers), Rank(0));
    }

    #[test]
    fn a_group_takes_requests_at_its_leader_once_all_have_loaded() {
        let mut workers = whole(2);
        let first = ready(&mut workers, 0);
        assert_eq!(workers.place(true, false), None);
        ready(&mut workers, 3);
        assert_eq!(workers.place(true, false), None, "ranks 0 and 3 are of two groups");
        let second = ready(&mut workers, 1);
        assert_eq!(chosen(&workers), Rank(0));
        assert_eq!(workers.group_of(Rank(0)), [(Rank(0), first), (Rank(1), second)]);
        assert!(workers.leaves_with_its_leader(second) && !workers.leaves_with_its_leader(first));
        assert_eq!((workers.loaded().count(), workers.ready().count()), (3, 1));
        workers.remove(first);
        assert!(!workers.leaves_with_its_leader(second), "its leader is gone already");
        assert_eq!(workers.place(true, false), None);
    }

    #[test]
    fn two_suspects_are_never_on_one_worker() {
        let mut workers = whole(1);
        let a = ready(&mut workers, 0);
        workers.book(a, key(1), Booking { requests: 1, tokens: 1, suspects: 1 }, false);
        assert_eq!(workers.place(true, true), None);
        assert!(workers.place(true, false).is_some(), "others may stand beside it");
        workers.release(a, key(1));
        assert!(workers.place(true, true).is_some());
    }

    #[test]
    fn a_worker_that_takes_no_messages_is_turned_away() {
        let mut workers = whole(1);
        let (link, _inbox) = mpsc::channel(1);
        let id = workers.join(Rank(0), 1, HERE, link);
        workers.get_mut(id).unwrap().phase = pb::WorkerPhase::Ready;
        let drain = || pb::conductor_message::Message::Drain(pb::Drain {});
        workers.send(id, drain());
        assert!(workers.place(true, false).is_some());
        workers.send(id, drain());
        assert_eq!(workers.place(true, false), None);
    }

    #[test]
    fn a_rank_that_comes_back_has_a_new_name() {
        let mut workers = whole(1);
        let first = ready(&mut workers, 0);
        workers.remove(first);
        assert_ne!(ready(&mut workers, 0), first);
    }
}
