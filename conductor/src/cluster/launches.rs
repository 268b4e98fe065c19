//! Where the parts of requests run: placing, launching, and the way from a prefill to its decode.

use std::{net::SocketAddr, time::Instant};

use tutti_proto::{
    GraphKey, RequestId, WorkerId,
    cluster::v1::{self as pb, conductor_message::Message as ToWorker},
};
use tutti_runtime::Error;

use super::{
    Cluster, State,
    placement::{Place, Wanted},
    prefixes::{Cached, Prefixes},
    roles::Role,
    workers::Booking,
};
use crate::{
    backend::random_bytes,
    request::{Dropped, Part, Placement, Request, Room, RoomFor},
};

impl Cluster {
    /// What a request's planes and embeddings travel under, if they ever do.
    pub(super) fn new_reservation(&self, has_media: bool) -> Result<pb::PlaneReservation, Error> {
        let lease_ms = self.limits.transfer_timeout.as_millis() as u32;
        let secret =
            if has_media || self.limits.topology.is_apart() { random_bytes()?.to_vec() } else { Vec::new() };
        Ok(pb::PlaneReservation { secret, lease_ms })
    }

    /// Sends the request's first graph to a worker; where none can take it, it waits.
    pub(super) fn launch(&self, state: &mut State, id: RequestId) {
        let Some(request) = state.requests.get_mut(&id).filter(|request| request.is_waiting()) else {
            return;
        };
        let now = Instant::now();
        let cached = state.prefixes.cached(request, now);
        let encodable = !request.has_media() || state.workers.ready_for(Role::Encode).next().is_some();
        let place = state.workers.place(&self.wanted(request, &cached)).filter(|_| encodable);
        let Some(place) = place else {
            state.waiting.insert(id);
            return;
        };
        let booking = self.take_place(&mut state.prefixes, request, &place, now);
        let Place { part, at, .. } = place;
        let resting = part == Part::Decode || request.has_media();
        if let Some(launch) = request.launch(part, at.clone(), now) {
            self.send_launch(state, at, booking, launch, resting);
        }
    }

    fn wanted<'a>(&self, request: &Request, cached: &'a Cached) -> Wanted<'a> {
        Wanted {
            may_decode: request.may_decode(),
            suspect: request.is_suspect(),
            blocks: request.blocks(),
            cached,
            most_requests: self.limits.max_running_requests.into(),
        }
    }

    /// The request, or a part of it, goes there, and has what was computed for it from now on. Returns what it takes.
    fn take_place(&self, prefixes: &mut Prefixes, request: &Request, place: &Place, now: Instant) -> Booking {
        let known = request.pieces().indexable();
        if known > 0 {
            for worker in place.at.values() {
                prefixes.sent(request, *worker, now);
            }
            self.metrics.placed(known, place.cached, prefixes.size());
        }
        Booking::of(request, place)
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
        let place = match room_for {
            RoomFor::Planes => state.workers.place_prefill(&wanted),
            RoomFor::Embeddings => state.workers.place_encoder(from, &wanted),
        };
        let Some(place) = place else {
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
        let booking = self.take_place(&mut state.prefixes, request, &place, now);
        let at = place.at;
        let (launch, resting) = match room_for {
            RoomFor::Planes => (request.launch_prefill(at.clone(), room, now), request.has_media()),
            RoomFor::Embeddings => (request.launch_encode(at.clone(), room, now), false),
        };
        if let Some(launch) = launch {
            self.send_launch(state, at, booking, launch, resting);
        }
    }

    fn send_launch(
        &self,
        state: &mut State,
        at: Placement,
        booking: Booking,
        launch: pb::LaunchGraph,
        resting: bool,
    ) {
        let key = GraphKey::from(launch.key.unwrap_or_default());
        let mut workers: Vec<WorkerId> = at.into_values().collect();
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
