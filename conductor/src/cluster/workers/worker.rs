//! One joined worker: what it has reported, and how long it has been silent or stuck.

use std::{net::IpAddr, time::Duration};

use tokio::sync::mpsc;
use tonic::Status;
use tutti_proto::{GraphKey, Rank, cluster::v1 as pb};
use tutti_runtime::Error;

use super::bookings::Bookings;
use crate::cluster::{pace::Steps, standing::Record};

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

/// The sending end of the channel to one worker. The channel holds [`crate::cluster::Limits::link_capacity`] messages.
/// The channel never fills while the conductor keeps its own limits, because each try of a request in flight is
/// launched and cancelled at most once on a worker.
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
    /// Graphs that the worker holds, and their load.
    pub bookings: Bookings,
    /// The worker's last steps.
    pub steps: Steps,
    /// Cost of a block of tokens on this worker, in percent of its peers'.
    pub cost_percent: u64,
    /// Standing among the peers.
    pub record: Record,
}

impl Worker {
    pub fn new(joining: Joining, link: Link) -> Self {
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
            bookings: Bookings::default(),
            steps: Steps::default(),
            cost_percent: 100,
            record: Record::default(),
        }
    }

    /// Maximum number of requests that the worker runs at a time: `settings_limit`, or the worker's own limit if its
    /// memory for slots holds fewer.
    pub fn running_limit(&self, settings_limit: usize) -> usize {
        self.running_limit.map_or(settings_limit, |limit| settings_limit.min(limit as usize))
    }

    /// Cost of computing a number of blocks.
    pub fn cost_of(&self, blocks: u64) -> u64 {
        blocks.saturating_mul(self.cost_percent)
    }

    /// Makes a resting graph active. A worker whose first graph becomes active begins to count as stuck from now on.
    pub fn activate(&mut self, key: GraphKey) {
        if !self.bookings.have_work() {
            self.stuck = Duration::ZERO;
        }
        self.bookings.activate(key);
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
