//! The joined workers: their phases, their roles, and the load that is booked on each.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::Entry},
    net::IpAddr,
    time::Duration,
};

use tokio::sync::mpsc;
use tonic::Status;
use tutti_proto::{
    GraphKey, Rank, RequestId, WorkerId,
    cluster::v1::{self as pb, conductor_message::Message as ToWorker},
};
use tutti_runtime::Error;

use super::{
    pace::Steps,
    placement::Placement,
    roles::{Duties, GroupRole},
    standing::Record,
    topology::{Replica, Topology},
};
use crate::request::{GraphRole, Members, Request};

/// Identity of a joining worker, from its `Hello` and its connection.
#[derive(Clone, Debug)]
pub struct Joining {
    /// The worker's rank.
    pub rank: Rank,
    /// The worker's process id.
    pub pid: u32,
    /// The address that the worker dials from.
    pub host: IpAddr,
    /// As in [`pb::Hello::meeting_path`].
    pub meeting_path: String,
}

/// The sending end of the channel to one worker. The channel holds [`super::Limits::link_capacity`] messages. The
/// channel never fills while the conductor keeps its own limits, because each try of a request in flight is launched
/// and cancelled at most once on a worker.
pub type Link = mpsc::Sender<Result<pb::ConductorMessage, Status>>;

/// A worker, from its `Hello` to the end of its stream.
#[derive(Debug)]
pub struct Worker {
    pub rank: Rank,
    pub pid: u32,
    /// The address that the worker dials from.
    pub host: IpAddr,
    /// As in [`pb::Hello::meeting_path`].
    pub meeting_path: String,
    pub phase: pb::WorkerPhase,
    pub load: pb::WorkerLoad,
    /// The worker's own description of the model; `None` until the worker's `Ready`.
    pub model: Option<pb::ModelDescription>,
    /// Number of requests that the worker runs at a time, as the worker reports; `None` until the worker is ready, and
    /// for ranks that follow a leader.
    pub running_limit: Option<u32>,
    /// The worker's description of its device; empty until the worker is ready.
    pub device: String,
    /// The channel to the worker; `None` once the worker is turned away. Dropping the link ends the worker's stream,
    /// and then the worker exits.
    pub link: Option<Link>,
    /// Number of forward passes that the worker had run at its last heartbeat.
    forwards: u64,
    /// Memory of the worker's process at its last heartbeat.
    pub resident_bytes: Option<u64>,
    /// Time since the worker's last message.
    pub silent: Duration,
    /// Time for which the worker has had work without progress.
    pub stuck: Duration,
    /// Graphs that the worker holds.
    graphs: HashMap<GraphKey, Held>,
    /// Number of `graphs` that are [`Activity::Resting`], because they wait for another worker's data.
    resting: usize,
    /// Sum of the bookings of all `graphs`.
    pub booked: Booking,
    /// Number of graphs launched on the worker so far.
    pub launched: u64,
    /// The worker's last steps.
    pub steps: Steps,
    /// Cost of a block of tokens on this worker, in percent of its peers'.
    pub cost_percent: u64,
    /// Standing among the peers.
    pub record: Record,
}

impl Worker {
    fn new(joining: Joining, link: Link) -> Self {
        let Joining { rank, pid, host, meeting_path } = joining;
        Self {
            rank,
            pid,
            host,
            meeting_path,
            phase: pb::WorkerPhase::Starting,
            load: pb::WorkerLoad::default(),
            model: None,
            running_limit: None,
            device: String::new(),
            link: Some(link),
            forwards: 0,
            resident_bytes: None,
            silent: Duration::ZERO,
            stuck: Duration::ZERO,
            graphs: HashMap::new(),
            resting: 0,
            booked: Booking::default(),
            launched: 0,
            steps: Steps::default(),
            cost_percent: 100,
            record: Record::default(),
        }
    }

    /// The requests of the graphs that the worker holds.
    pub fn requests(&self) -> BTreeSet<RequestId> {
        self.graphs.keys().map(|key| key.request).collect()
    }

    /// Maximum number of requests that the worker runs at a time: `settings_limit`, or the worker's own limit if its
    /// memory for slots holds fewer.
    pub fn running_limit(&self, settings_limit: usize) -> usize {
        self.running_limit.map_or(settings_limit, |limit| settings_limit.min(limit as usize))
    }

    /// True if the worker holds any graph.
    #[cfg(test)]
    pub fn holds_any(&self) -> bool {
        !self.graphs.is_empty()
    }

    /// True if the worker holds an active graph, so that the worker is expected to make steps.
    pub fn has_work(&self) -> bool {
        self.graphs.len() > self.resting
    }

    /// True if a graph has been in a step, or is not held.
    pub fn has_begun(&self, key: GraphKey) -> bool {
        self.graphs.get(&key).is_none_or(|held| held.begun)
    }

    /// Number of graphs that have been in a step.
    pub fn begun(&self) -> usize {
        self.graphs.values().filter(|held| held.begun).count()
    }

    /// Cost of computing a number of blocks.
    pub fn cost_of(&self, blocks: u64) -> u64 {
        blocks.saturating_mul(self.cost_percent)
    }

    fn activate(&mut self, key: GraphKey) {
        if !self.has_work() {
            self.stuck = Duration::ZERO;
        }
        if let Some(held) = self.graphs.get_mut(&key).filter(|held| held.activity == Activity::Resting) {
            held.activity = Activity::Active;
            self.resting -= 1;
        }
    }

    /// Stores the counters of a heartbeat. A changed counter is progress.
    pub fn take_heartbeat(&mut self, beat: &pb::Heartbeat) {
        let load = beat.load.unwrap_or_default();
        if (load.steps, beat.forwards) != (self.load.steps, self.forwards) {
            self.stuck = Duration::ZERO;
        }
        (self.load, self.forwards) = (load, beat.forwards);
    }

    /// Ends the worker's stream with the error `why`. The worker gets no further messages, and is removed from the
    /// cluster when its stream ends.
    pub fn turn_away(&mut self, why: Error) {
        if let Some(link) = self.link.take() {
            // A failure to send is ignored: either the worker does not read and the link is full, or the stream has
            // already ended.
            let _ = link.try_send(Err(why.into()));
        }
    }

    /// The name of a walk in the worker's model; "undeclared" if the model has no such walk.
    pub fn walk_name(&self, walk: u32) -> &str {
        let declaration = self.model.as_ref().and_then(|model| model.declaration.as_ref());
        let walk = declaration.and_then(|declaration| declaration.walks.get(walk as usize));
        walk.map_or("undeclared", |walk| &walk.name)
    }
}

/// The load that a worker graph puts on its worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Booking {
    pub requests: u64,
    /// Number of prompt blocks that are not computed yet.
    pub queued_blocks: u64,
    /// Number of blocks of graphs that decode, or that wait to decode after their prompt has been computed.
    pub active_blocks: u64,
    /// Number of requests that may be the cause of their workers' crashes.
    pub suspects: u64,
}

impl Booking {
    /// The load of a request's graph at its placement.
    pub fn new(request: &Request, placement: &Placement) -> Self {
        let blocks = request.blocks();
        let (queued_blocks, active_blocks) = match placement.role {
            GraphRole::Whole | GraphRole::Prefill => (blocks.saturating_sub(placement.cached), 0),
            GraphRole::Decode => (0, blocks),
            GraphRole::Encode => (request.media_blocks(), 0),
        };
        Self { requests: 1, queued_blocks, active_blocks, suspects: request.is_suspect().into() }
    }

    /// Number of blocks that delay a new request on the worker: prompt blocks queued before the request, and blocks of
    /// decodes that share its steps.
    pub fn blocks(&self) -> u64 {
        self.queued_blocks + self.active_blocks
    }

    fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.queued_blocks += other.queued_blocks;
        self.active_blocks += other.active_blocks;
        self.suspects += other.suspects;
    }

    /// Subtracts the booking `other`, which must have been added before, so that no field underflows.
    fn subtract(&mut self, other: Self) {
        self.requests -= other.requests;
        self.queued_blocks -= other.queued_blocks;
        self.active_blocks -= other.active_blocks;
        self.suspects -= other.suspects;
    }
}

/// Participation of a graph in its worker's steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// The graph takes part in steps.
    Active,
    /// The graph waits for another worker's planes or embeddings. Until they arrive, the worker makes no steps for the
    /// graph.
    Resting,
}

/// A graph that a worker holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    booking: Booking,
    activity: Activity,
    /// True once the graph has been in a step.
    begun: bool,
}

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
        self.get(id).is_none_or(|worker| worker.has_begun(key))
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
            && let Entry::Vacant(vacant) = worker.graphs.entry(key)
        {
            vacant.insert(Held { booking, activity: Activity::Resting, begun: false });
            worker.resting += 1;
            worker.booked.add(booking);
            worker.launched += 1;
            if activity == Activity::Active {
                worker.activate(key);
            }
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
        if let Some(held) = self.by_id.get_mut(&id).and_then(|worker| worker.graphs.get_mut(&key)) {
            held.begun = true;
        }
    }

    /// Books a graph as decoding: its prompt is computed, and prompt and output together take `blocks` blocks.
    pub fn set_decoding(&mut self, id: WorkerId, key: GraphKey, blocks: u64) {
        let Some(worker) = self.by_id.get_mut(&id) else { return };
        let Some(held) = worker.graphs.get_mut(&key) else { return };
        held.begun = true;
        let booking = Booking { queued_blocks: 0, active_blocks: blocks, ..held.booking };
        worker.booked.subtract(std::mem::replace(&mut held.booking, booking));
        worker.booked.add(booking);
    }

    /// Removes a completed graph from its worker's load. Returns true if this makes room for another graph, and false
    /// if the worker is lost or did not hold the graph.
    pub fn release(&mut self, id: WorkerId, key: GraphKey) -> bool {
        let Some(worker) = self.by_id.get_mut(&id) else { return false };
        let Some(held) = worker.graphs.remove(&key) else { return false };
        worker.resting -= usize::from(held.activity == Activity::Resting);
        worker.booked.subtract(held.booking);
        true
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
