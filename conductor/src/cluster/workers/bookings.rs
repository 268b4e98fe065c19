//! The load that the conductor books on a worker for each graph that the worker holds.

use std::collections::{BTreeSet, HashMap, hash_map::Entry};

use tutti_proto::{GraphKey, RequestId};

use crate::{
    cluster::placement::Placement,
    request::{GraphRole, Request},
};

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

/// The graphs that one worker holds, and the sum of their load.
#[derive(Debug, Default)]
pub struct Bookings {
    graphs: HashMap<GraphKey, Held>,
    /// Number of `graphs` that are [`Activity::Resting`], because they wait for another worker's data.
    resting: usize,
    sum: Booking,
    /// Number of graphs launched on the worker so far.
    launched: u64,
}

impl Bookings {
    /// Sum of the bookings of all graphs.
    pub fn sum(&self) -> Booking {
        self.sum
    }

    /// Number of graphs launched on the worker so far.
    pub fn launched(&self) -> u64 {
        self.launched
    }

    /// The requests of all graphs.
    pub fn requests(&self) -> BTreeSet<RequestId> {
        self.graphs.keys().map(|key| key.request).collect()
    }

    /// True if there is no graph.
    #[cfg(test)]
    pub fn are_empty(&self) -> bool {
        self.graphs.is_empty()
    }

    /// True if a graph is active, so that the worker is expected to make steps.
    pub fn have_work(&self) -> bool {
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

    /// Adds a graph that rests. Returns false if the worker holds the graph already.
    pub fn add(&mut self, key: GraphKey, booking: Booking) -> bool {
        let Entry::Vacant(vacant) = self.graphs.entry(key) else { return false };
        vacant.insert(Held { booking, activity: Activity::Resting, begun: false });
        self.resting += 1;
        self.sum.add(booking);
        self.launched += 1;
        true
    }

    /// Makes a resting graph active.
    pub fn activate(&mut self, key: GraphKey) {
        if let Some(held) = self.graphs.get_mut(&key).filter(|held| held.activity == Activity::Resting) {
            held.activity = Activity::Active;
            self.resting -= 1;
        }
    }

    /// Records that a graph has been in a step.
    pub fn begin(&mut self, key: GraphKey) {
        if let Some(held) = self.graphs.get_mut(&key) {
            held.begun = true;
        }
    }

    /// Books a graph as decoding: its prompt is computed, and prompt and output together take `blocks` blocks.
    pub fn set_decoding(&mut self, key: GraphKey, blocks: u64) {
        let Some(held) = self.graphs.get_mut(&key) else { return };
        held.begun = true;
        let booking = Booking { queued_blocks: 0, active_blocks: blocks, ..held.booking };
        self.sum.subtract(std::mem::replace(&mut held.booking, booking));
        self.sum.add(booking);
    }

    /// Removes a completed graph. Returns false if the worker did not hold it.
    pub fn remove(&mut self, key: GraphKey) -> bool {
        let Some(held) = self.graphs.remove(&key) else { return false };
        self.resting -= usize::from(held.activity == Activity::Resting);
        self.sum.subtract(held.booking);
        true
    }
}
