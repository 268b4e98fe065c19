//! Placement: the worker where a request costs least, in blocks of tokens.
//!
//! `cost = uncached prompt blocks + active decode blocks + queued prompt blocks`: the request's own prefill on that
//! worker, the decodes that share its steps, and the prefills before it. A cached prefix counts no more than the wait
//! for it, so load wins in the end.

use tutti_proto::WorkerId;

use super::{
    Limits,
    prefixes::Cached,
    roles::GroupRole,
    workers::{Worker, Workers},
};
use crate::request::{GraphRole, Members, Request};

/// A request that needs a placement.
#[derive(Clone, Copy, Debug)]
pub struct PlacementQuery<'a> {
    /// True if a token may follow the first one.
    pub may_decode: bool,
    /// True if the request may crash its workers.
    pub suspect: bool,
    /// Blocks of the prompt and of the output so far.
    pub blocks: u64,
    /// Leading blocks that each worker has cached.
    pub cached: &'a Cached,
    /// The most requests that a worker runs at a time. More requests wait there, whatever the load.
    pub most_requests: u64,
}

impl<'a> PlacementQuery<'a> {
    pub fn new(request: &Request, cached: &'a Cached, limits: &Limits) -> Self {
        Self {
            may_decode: request.may_decode(),
            suspect: request.is_suspect(),
            blocks: request.blocks(),
            cached,
            most_requests: limits.engine.max_running_requests as u64,
        }
    }
}

/// The workers of one worker graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    pub role: GraphRole,
    /// A group's leader alone: the other ranks follow it and hold nothing of a request, so its completion is the group's.
    pub members: Members,
    /// Blocks of the prompt that the worker has cached.
    pub cached: u64,
}

/// Cost of a request on a worker. The smaller one wins; ties go to fewer requests, then to fewer launches so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    full: bool,
    blocks: u64,
    requests: u64,
    launched: u64,
}

impl Cost {
    fn new(query: &PlacementQuery<'_>, id: WorkerId, worker: &Worker) -> Self {
        Self {
            full: worker.booked.requests >= query.most_requests,
            blocks: query.blocks.saturating_sub(query.cached.at(id)) + worker.booked.blocks(),
            requests: worker.booked.requests,
            launched: worker.launched,
        }
    }

    /// Cost of a prefill followed by a decode. The prompt is computed once, so the decode adds only its worker's load.
    fn with_decode(self, decode: &Candidate<'_>) -> Self {
        Self {
            full: self.full || decode.cost.full,
            blocks: self.blocks + decode.worker.booked.blocks(),
            requests: decode.worker.booked.requests,
            launched: decode.worker.launched,
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
    /// The cheapest ready worker for a graph of this role. A suspect goes only where there is no other suspect.
    fn cheapest(&self, role: GraphRole, query: &PlacementQuery<'_>) -> Option<Candidate<'_>> {
        self.ready_for(role.into())
            .filter(|(_, worker)| !query.suspect || worker.booked.suspects == 0)
            .map(|(id, worker)| Candidate { role, cost: Cost::new(query, id, worker), id, worker })
            .min_by_key(|candidate| candidate.cost)
    }

    /// The first graph of a request: the whole request, a prefill that no decode follows, or a decode, which reserves
    /// room and needs a ready worker for the prefill.
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

    /// The prefill of a request whose decode has reserved room.
    pub fn place_prefill(&self, query: &PlacementQuery<'_>) -> Option<Placement> {
        Some(self.cheapest(GraphRole::Prefill, query)?.into_placement(query))
    }

    /// The encoder of a request's media: the worker that prefills if it encodes too, so that nothing leaves the worker.
    pub fn place_encoder(&self, prefill: WorkerId, query: &PlacementQuery<'_>) -> Option<Placement> {
        // Encoders keep no results.
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
