//! Launches of worker graphs: placement, the launch message, and the room that workers reserve for transferred data.

use std::{
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use tutti_proto::{GraphKey, RequestId, WorkerId, cluster::v1 as pb, declaration::WalkId};
use tutti_runtime::{Error, token::random_bytes};

use super::{
    Cluster, State,
    placement::{Placement, PlacementQuery},
    prefixes::Prefixes,
    roles::GroupRole,
    workers::{Activity, Booking},
};
use crate::request::{Dropped, GraphRole, Request, ReservedRoom, RoomFor};

impl Cluster {
    /// Returns a secret and a lease for the planes and embeddings of a new request. The secret is empty if nothing is
    /// transferred. `encoders` are the walks that encode the request's media; empty for a request of text.
    pub(super) fn new_reservation(&self, encoders: &[WalkId]) -> Result<pb::PlaneReservation, Error> {
        let lease_ms = self.limits.faults.transfer_timeout().as_millis() as u32;
        let transfers = !encoders.is_empty() || self.limits.topology.is_disaggregated();
        let secret = if transfers { random_bytes()?.to_vec() } else { Vec::new() };
        Ok(pb::PlaneReservation { secret, lease_ms })
    }

    /// Launches a request's first graph. The request waits if no worker can take it.
    pub(super) fn launch(&self, state: &mut State, id: RequestId) {
        let Some(request) = state.requests.get_mut(id).filter(|request| request.is_waiting()) else {
            return;
        };
        let now = Instant::now();
        let cached = state.prefixes.cached(request, now);
        let workers = &mut state.membership.workers;
        let encodable = !request.has_media() || workers.ready_for(GroupRole::Encode).next().is_some();
        let query = PlacementQuery::new(request, &cached, &self.limits);
        let Some(placement) = workers.place_request(&query).filter(|_| encodable) else {
            state.requests.wait(id);
            return;
        };
        let booking = self.record_placement(&mut state.prefixes, request, &placement, now);
        let Placement { role, members, .. } = placement;
        let waits = role == GraphRole::Decode || request.has_media();
        let activity = if waits { Activity::Resting } else { Activity::Active };
        if let Some(launch) = request.launch(role, members.clone(), now) {
            state.recent.launched(id, role, members.keys().next().copied());
            workers.launch(members, booking, activity, launch);
        }
    }

    /// Adds the prompt of a placed request to the prefix index, and counts the placement in metrics. Returns the load
    /// that the request's graph adds to its worker.
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
                prefixes.insert(request, *worker, now);
            }
            self.metrics.placed(known, placement.cached, prefixes.size());
        }
        Booking::new(request, placement)
    }

    /// Handles a worker's `Reserved` message: the worker has reserved room for planes or embeddings. Launches the graph
    /// that computes these planes or embeddings. Starts the request over if no worker is ready to run that graph.
    pub fn on_reserved(&self, from: WorkerId, reserved: pb::Reserved) {
        let state = &mut *self.state.lock();
        let workers = &mut state.membership.workers;
        let Some((rank, host)) = workers.hear(from).map(|worker| (worker.rank, worker.host)) else {
            return self.metrics.dropped(Dropped::Stale);
        };
        let key = GraphKey::from(reserved.key.unwrap_or_default());
        let Some(request) = state.requests.get_mut(key.request) else {
            return self.metrics.dropped(state.requests.why_unknown(key.request));
        };
        let room_for = match request.check_reserved(from, key) {
            Ok(room_for) => room_for,
            Err(why) => return self.metrics.dropped(why),
        };
        let now = Instant::now();
        let cached = state.prefixes.cached(request, now);
        let query = PlacementQuery::new(request, &cached, &self.limits);
        let placement = match room_for {
            RoomFor::Planes => workers.place_prefill(&query),
            RoomFor::Embeddings => workers.place_encoder(from, &query),
        };
        let Some(placement) = placement else {
            let effects = request.give_room_back();
            return self.apply(state, key.request, effects);
        };
        let followers = workers.group_of(rank).into_iter().skip(1);
        let hosts = followers.filter_map(|(rank, _)| workers.by_rank(rank).map(|(_, worker)| worker.host));
        let ranks = reserved.ranks.into_iter().zip(hosts).map(|(room, host)| pb::RankDestination {
            address: address(host, room.port, &room.socket),
            shared_memory: room.shared_memory,
        });
        let room = ReservedRoom {
            address: address(host, reserved.port, &reserved.socket),
            layout_hash: reserved.layout_hash,
            shared_memory: reserved.shared_memory,
            known_pages: reserved.known_pages,
            ranks: ranks.collect(),
        };
        let booking = self.record_placement(&mut state.prefixes, request, &placement, now);
        let members = placement.members;
        let (launch, activity) = match room_for {
            RoomFor::Planes => {
                let activity = if request.has_media() { Activity::Resting } else { Activity::Active };
                (request.launch_prefill(members.clone(), room, now), activity)
            }
            RoomFor::Embeddings => (request.launch_encode(members.clone(), room, now), Activity::Active),
        };
        if let Some(launch) = launch {
            let role = match room_for {
                RoomFor::Planes => GraphRole::Prefill,
                RoomFor::Embeddings => GraphRole::Encode,
            };
            state.recent.launched(key.request, role, members.keys().next().copied());
            workers.launch(members, booking, activity, launch);
        }
    }
}

/// Address at which other workers reach a worker. Only a worker of this machine may name a socket. An invalid port
/// becomes 0, to which a sender fails to connect.
fn address(host: IpAddr, port: u32, socket: &str) -> String {
    if host.is_loopback() && !socket.is_empty() {
        return format!("unix:{socket}");
    }
    SocketAddr::new(host, u16::try_from(port).unwrap_or_default()).to_string()
}

#[cfg(test)]
mod tests;
