//! Placement: the choice of the worker on which a request costs least. Costs are in blocks of tokens.
//!
//! `cost = uncached prompt blocks + active decode blocks + queued prompt blocks`: the request's own prefill on that
//! worker, the decodes that share the worker's steps, and the prefills that are queued before the request's own. A
//! cached prefix saves at most its own blocks, so a worker with enough load loses in spite of its cache. A block costs
//! more on a worker whose steps take longer than its peers', and a worker that is set aside as slow comes last.

use tutti_proto::WorkerId;

use super::{
    Limits,
    prefixes::Cached,
    roles::GroupRole,
    standing::Turn,
    workers::{Worker, Workers},
};
use crate::request::{GraphRole, Members, Request};

/// A request that needs a placement.
#[derive(Clone, Copy, Debug)]
pub struct PlacementQuery<'a> {
    /// True if a token may follow the token that the prefill samples, so that a decode is needed.
    pub may_decode: bool,
    /// True if the request may be the cause of its workers' crashes.
    pub suspect: bool,
    /// Number of blocks of the prompt and of the output so far.
    pub blocks: u64,
    /// Number of leading blocks of the prompt that each worker has cached.
    pub cached: &'a Cached,
    /// The settings' maximum number of requests that a worker runs at a time. A worker's memory may hold fewer. Further
    /// requests wait at the worker, whatever the load.
    pub most_requests: usize,
}

impl<'a> PlacementQuery<'a> {
    pub fn new(request: &Request, cached: &'a Cached, limits: &Limits) -> Self {
        Self {
            may_decode: request.may_decode(),
            suspect: request.is_suspect(),
            blocks: request.blocks(),
            cached,
            most_requests: limits.engine.running_limit(),
        }
    }
}

/// The workers of one worker graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    pub role: GraphRole,
    /// The worker that runs the graph. In a TP group this is the leader alone. The other ranks follow the leader and
    /// keep no requests, so only the leader reports the graph's completion.
    pub members: Members,
    /// Number of blocks of the prompt that the worker has cached.
    pub cached: u64,
}

/// Cost of a request on a worker; the smallest cost wins. Fields are compared in order: a worker whose turn is earlier
/// comes first, then one that is not full, then cheaper blocks, then fewer requests, then fewer launches so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    turn: Turn,
    full: bool,
    /// Cost of the blocks, in percent of a block on a worker of the usual pace.
    blocks: u64,
    requests: u64,
    launched: u64,
}

impl Cost {
    fn new(query: &PlacementQuery<'_>, id: WorkerId, worker: &Worker) -> Self {
        let booked = worker.bookings.sum();
        Self {
            turn: worker.record.turn(booked.requests),
            full: booked.requests >= worker.running_limit(query.most_requests) as u64,
            blocks: worker.cost_of(query.blocks.saturating_sub(query.cached.at(id)) + booked.blocks()),
            requests: booked.requests,
            launched: worker.bookings.launched(),
        }
    }

    /// Cost of this prefill followed by a decode on another worker. The prefill already counts the request's own
    /// blocks, so the decode adds only the blocks that are booked on the decode's worker.
    fn with_decode(self, decode: &Candidate<'_>) -> Self {
        let booked = decode.worker.bookings.sum();
        Self {
            turn: self.turn.max(decode.cost.turn),
            full: self.full || decode.cost.full,
            blocks: self.blocks.saturating_add(decode.worker.cost_of(booked.blocks())),
            requests: booked.requests,
            launched: decode.worker.bookings.launched(),
        }
    }
}

/// A worker that could run a graph.
#[derive(Clone, Copy, Debug)]
struct Candidate<'a> {
    role: GraphRole,
    cost: Cost,
    id: WorkerId,
    worker: &'a Worker,
}

impl Candidate<'_> {
    fn into_placement(self, query: &PlacementQuery<'_>) -> Placement {
        let members = Members::from([(self.worker.rank, self.id)]);
        Placement { role: self.role, members, cached: query.cached.at(self.id) }
    }
}

impl Workers {
    /// Returns the cheapest ready worker for a graph of this role. A suspect request goes only to a worker without
    /// another suspect.
    fn cheapest(&self, role: GraphRole, query: &PlacementQuery<'_>) -> Option<Candidate<'_>> {
        self.ready_for(role.into())
            .filter(|(_, worker)| !query.suspect || worker.bookings.sum().suspects == 0)
            .map(|(id, worker)| Candidate { role, cost: Cost::new(query, id, worker), id, worker })
            .min_by_key(|candidate| candidate.cost)
    }

    /// Places the first graph of a request: the whole request, a prefill that no decode follows, or a decode. A decode
    /// reserves room for the planes of the prefill, so it also needs a ready worker for the prefill.
    pub fn place_request(&self, query: &PlacementQuery<'_>) -> Option<Placement> {
        let whole = self.cheapest(GraphRole::Whole, query);
        let prefill = self.cheapest(GraphRole::Prefill, query);
        let disaggregated = if query.may_decode {
            prefill
                .zip(self.cheapest(GraphRole::Decode, query))
                .map(|(prefill, decode)| Candidate { cost: prefill.cost.with_decode(&decode), ..decode })
        } else {
            prefill
        };
        let cheapest = whole.into_iter().chain(disaggregated).min_by_key(|candidate| candidate.cost)?;
        Some(cheapest.into_placement(query))
    }

    /// Places the prefill of a request whose decode has reserved room.
    pub fn place_prefill(&self, query: &PlacementQuery<'_>) -> Option<Placement> {
        Some(self.cheapest(GraphRole::Prefill, query)?.into_placement(query))
    }

    /// Places the encoder of a request's media. The worker `prefill` gets the encoder if it also encodes, so that the
    /// embeddings do not leave that worker.
    pub fn place_encoder(&self, prefill: WorkerId, query: &PlacementQuery<'_>) -> Option<Placement> {
        // Encoders do not cache results, so no worker has cached blocks.
        let query = PlacementQuery { cached: &Cached::default(), ..*query };
        let itself = self.ready_for(GroupRole::Encode).find(|(id, _)| *id == prefill);
        let itself = itself.map(|(id, worker)| Candidate {
            role: GraphRole::Encode,
            cost: Cost::new(&query, id, worker),
            id,
            worker,
        });
        let encoder = itself.or_else(|| self.cheapest(GraphRole::Encode, &query))?;
        Some(encoder.into_placement(&query))
    }
}

#[cfg(test)]
mod tests;
