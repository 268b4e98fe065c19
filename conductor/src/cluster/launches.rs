//! Where the parts of requests run: placing, launching, and the way from a prefill to its decode.

use std::{net::SocketAddr, time::Instant};

use tutti_proto::{
    GraphKey, RequestId, WorkerId,
    cluster::v1::{self as pb, conductor_message::Message as ToWorker},
};
use tutti_runtime::Error;

use super::{
    Cluster, State,
    placement::{Placement, PlacementQuery},
    prefixes::{Cached, Prefixes},
    roles::GroupRole,
    workers::Booking,
};
use crate::{
    backend::random_bytes,
    request::{Dropped, GraphRole, Members, Request, Room, RoomFor},
};

impl Cluster {
    /// What a request's planes and embeddings travel under, if they ever do.
    pub(super) fn new_reservation(&self, has_media: bool) -> Result<pb::PlaneReservation, Error> {
        let lease_ms = self.limits.transfer_timeout.as_millis() as u32;
        let secret = if has_media || self.limits.topology.is_disaggregated() {
            random_bytes()?.to_vec()
        } else {
            Vec::new()
        };
        Ok(pb::PlaneReservation { secret, lease_ms })
    }

    /// Sends the request's first graph to a worker; where none can take it, it waits.
    pub(super) fn launch(&self, state: &mut State, id: RequestId) {
        let Some(request) = state.requests.get_mut(&id).filter(|request| request.is_waiting()) else {
            return;
        };
        let now = Instant::now();
        let cached = state.prefixes.cached(request, now);
        let encodable = !request.has_media() || state.workers.ready_for(GroupRole::Encode).next().is_some();
        let placement = state.workers.place_request(&self.wanted(request, &cached)).filter(|_| encodable);
        let Some(placement) = placement else {
            state.waiting.insert(id);
            return;
        };
        let booking = self.record_placement(&mut state.prefixes, request, &placement, now);
        let Placement { role, members, .. } = placement;
        let resting = role == GraphRole::Decode || request.has_media();
        if let Some(launch) = request.launch(role, members.clone(), now) {
            self.send_launch(state, members, booking, launch, resting);
        }
    }

    fn wanted<'a>(&self, request: &Request, cached: &'a Cached) -> PlacementQuery<'a> {
        PlacementQuery {
            may_decode: request.may_decode(),
            suspect: request.is_suspect(),
            blocks: request.blocks(),
            cached,
            most_requests: self.limits.max_running_requests.into(),
        }
    }

    /// The request, or a part of it, goes there, and has what was computed for it from now on. Returns what it takes.
    fn record_placement(
        &self,
        prefixes: &mut Prefixes,
        request: &Request,
        placement: &Placement,
        now: Instant,
    ) -> Booking {
        let known = request.pieces().indexable();
        if known > 0 {
            for worker in placement.members.values() {
                prefixes.sent(request, *worker, now);
            }
            self.metrics.placed(known, placement.cached, prefixes.size());
        }
        Booking::of(request, placement)
    }

    /// A worker holds room for what another one computes of a request: that one can begin, if there is one to do it.
    pub fn on_reserved(&self, from: WorkerId, reserved: pb::Reserved) {
        let state = &mut *self.state.lock();
        let Some(host) = state.workers.hear(from).map(|worker| worker.host) else {
            return self.metrics.dropped(Dropped::Stale);
        };
        let key = GraphKey::from(reserved.key.unwrap_or_default());
        let Some(request) = state.requests.get_mut(&key.request) else {
            return self.metrics.dropped(self.why_unknown(state, key.request));
        };
        let room_for = match request.check_reserved(from, key) {
            Ok(room_for) => room_for,
            Err(why) => return self.metrics.dropped(why),
        };
        let now = Instant::now();
        let cached = state.prefixes.cached(request, now);
        let wanted = self.wanted(request, &cached);
        let placement = match room_for {
            RoomFor::Planes => state.workers.place_prefill(&wanted),
            RoomFor::Embeddings => state.workers.place_encoder(from, &wanted),
        };
        let Some(placement) = placement else {
            let effects = request.give_room_back();
            return self.apply(state, key.request, effects);
        };
        let room = Room {
            // A port that is none is one that the prefill's worker will not reach.
            address: SocketAddr::new(host, u16::try_from(reserved.port).unwrap_or_default()).to_string(),
            layout_hash: reserved.layout_hash,
            shared_memory: reserved.shared_memory,
            known_pages: reserved.known_pages,
        };
        let booking = self.record_placement(&mut state.prefixes, request, &placement, now);
        let members = placement.members;
        let (launch, resting) = match room_for {
            RoomFor::Planes => (request.launch_prefill(members.clone(), room, now), request.has_media()),
            RoomFor::Embeddings => (request.launch_encode(members.clone(), room, now), false),
        };
        if let Some(launch) = launch {
            self.send_launch(state, members, booking, launch, resting);
        }
    }

    fn send_launch(
        &self,
        state: &mut State,
        members: Members,
        booking: Booking,
        launch: pb::LaunchGraph,
        resting: bool,
    ) {
        let key = GraphKey::from(launch.key.unwrap_or_default());
        let mut workers: Vec<WorkerId> = members.into_values().collect();
        // The last one takes the message itself: most graphs have one worker, and prompts may be long.
        let last = workers.pop();
        for worker in workers {
            state.workers.book(worker, key, booking, resting);
            state.workers.send(worker, ToWorker::Launch(launch.clone()));
        }
        if let Some(worker) = last {
            state.workers.book(worker, key, booking, resting);
            state.workers.send(worker, ToWorker::Launch(launch));
        }
    }

    /// Of a request that is not here: ids are minted in order, so one at or below the newest was a request of ours, and it
    /// is over.
    pub(super) fn why_unknown(&self, state: &State, id: RequestId) -> Dropped {
        if (1..=state.next_request).contains(&id.0) { Dropped::Stale } else { Dropped::Unknown }
    }
}
