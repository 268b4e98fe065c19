//! Launches of a request's graphs, and the room that their workers reserve first.

use std::time::Instant;

use tutti_proto::{GraphKey, WorkerId, cluster::v1 as pb};

use super::{Phase, Request, RoomFor, encoding, stage::Stage};
use crate::request::{Dropped, GraphRole, Members, run::Run};

/// Room for planes or embeddings at a worker, as its `Reserved` message describes it.
#[derive(Clone, Debug)]
pub struct ReservedRoom {
    /// `ip:port` at which other workers reach the worker.
    pub address: String,
    /// Layout of the planes or embeddings. Sender and receiver must agree on the layout.
    pub layout_hash: u64,
    /// Path of the shared memory that senders on the same machine write to; empty if there is none.
    pub shared_memory: String,
    /// Number of leading pages that the receiver already has and that are not sent.
    pub known_pages: u32,
    /// Rooms at the other ranks of the receiving TP group, from rank 1 on, for those ranks' shares of the planes.
    pub ranks: Vec<pb::RankDestination>,
}

impl Request {
    /// Launches the request's first graph on `members`: the whole request, a prefill without a decode, or a decode,
    /// which reserves room first. The returned message carries the time that is left until the deadline. Returns `None`
    /// and changes nothing unless the request waits for a placement.
    pub fn launch(&mut self, role: GraphRole, members: Members, now: Instant) -> Option<pb::LaunchGraph> {
        if !self.is_waiting() {
            return None;
        }
        self.spans.placed();
        let mut message = self.message(role, now);
        let run = self.begin(role, members);
        let stage = match role {
            GraphRole::Whole | GraphRole::Prefill => {
                self.await_embeddings(&mut message);
                Stage::Running { run }
            }
            GraphRole::Decode => {
                message.receive = Some(self.reservation.clone());
                Stage::Reserving { decode: run }
            }
            // An encoder is never the first graph, because the graph that receives the embeddings must be launched
            // first.
            GraphRole::Encode => return None,
        };
        self.enter(stage);
        Some(message)
    }

    /// Returns the purpose of the room that a worker's `Reserved` message announces, or why the message is dropped.
    pub fn check_reserved(&self, from: WorkerId, key: GraphKey) -> Result<RoomFor, Dropped> {
        let Phase::Live { stage, encoding, .. } = &self.phase else { return Err(self.why_unmatched(key)) };
        let (run, purpose) = match stage {
            Stage::Reserving { decode } => (Some(decode), RoomFor::Planes),
            _ => (stage.prefilling().filter(|_| encoding.is_due()), RoomFor::Embeddings),
        };
        match run {
            Some(run) if run.key == key && run.leader() == Some(from) => Ok(purpose),
            Some(run) if run.key == key => Err(Dropped::Unknown),
            _ if stage.runs().any(|run| run.key == key) => Err(Dropped::Duplicate),
            _ => Err(self.why_unmatched(key)),
        }
    }

    /// Launches the prefill on `members`. The prefill pushes its planes to `room`, which the decode's worker has
    /// reserved. Returns `None` and changes nothing unless the request is `Reserving`.
    pub fn launch_prefill(
        &mut self,
        members: Members,
        room: ReservedRoom,
        now: Instant,
    ) -> Option<pb::LaunchGraph> {
        let Phase::Live { stage: Stage::Reserving { decode }, .. } = &self.phase else { return None };
        let send_to = self.destination(decode.key, room, &members);
        let mut message = pb::LaunchGraph { send_to: Some(send_to), ..self.message(GraphRole::Prefill, now) };
        self.await_embeddings(&mut message);
        let prefill = self.begin(GraphRole::Prefill, members);
        if let Phase::Live { stage, .. } = &mut self.phase {
            *stage = match std::mem::replace(stage, Stage::Waiting) {
                Stage::Reserving { decode } => Stage::Prefilling { prefill, decode, early: Vec::new() },
                other => other,
            };
        }
        Some(message)
    }

    /// The destination of what `members`, the leader first, send to a graph.
    pub(super) fn destination(
        &self,
        to: GraphKey,
        room: ReservedRoom,
        members: &Members,
    ) -> pb::PlaneDestination {
        let pb::PlaneReservation { secret, lease_ms } = self.reservation.clone();
        pb::PlaneDestination {
            key: Some(to.into()),
            address: room.address,
            secret,
            lease_ms,
            layout_hash: room.layout_hash,
            shared_memory: room.shared_memory,
            known_pages: room.known_pages,
            ranks: room.ranks,
            sender: members.keys().next().map_or(0, |leader| leader.0),
        }
    }

    pub(super) fn message(&self, role: GraphRole, now: Instant) -> pb::LaunchGraph {
        pb::LaunchGraph {
            key: Some(self.key(role).into()),
            walks: role.walks(self.walks, &self.encoders),
            spec: Some(encoding::spec_for(role, &self.spec)),
            generated: if role == GraphRole::Encode { Vec::new() } else { self.generated.clone() },
            timeout_ms: self.deadline.map(|deadline| deadline.left_ms(now)),
            trace: self.spans.to_message(),
            share: self.share,
            request_id: self.spans.request_id().to_owned(),
            ..Default::default()
        }
    }

    pub(super) fn begin(&self, role: GraphRole, members: Members) -> Run {
        let key = self.key(role);
        self.spans.in_scope(|| tracing::debug!(%key, ?role, ranks = ?members.keys(), "launched"));
        self.spans.launched(key, role, &members);
        Run::new(key, members, self.generated.len())
    }
}
