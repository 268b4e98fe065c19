//! This process's end of all transfers.
//!
//! A leader and a follower push, reserve and receive alike. They differ in the destination of their [events](role).

mod role;
mod stream_connector;

use std::{io, sync::Arc, time::Duration};

use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
};
use tutti_kernels::collective::GroupRank;
use tutti_proto::{
    GraphKey,
    cluster::v1::{self as pb, rank_order::Order, rank_report::Report},
};
use tutti_runtime::token;
use tutti_scheduler::TransferError;

pub(crate) use self::role::{Events, Follower, Leader, Role};
pub use self::{role::Hosts, stream_connector::StreamConnector};
use crate::{
    Extent, Network, PageLayout, UnitKind, UnitLayout, Units,
    network::ServiceAddress,
    ranks::{Ranks, Reports},
    receive::{Listener, Receiver, Reservations, Space},
    segment::Segment,
    send::Sender,
};

/// Maximum number of events that wait for the engine. Further events wait in their streams.
const QUEUED_EVENTS: usize = 16;

/// Returns a new secret for the group, or the reason why none could be made.
fn group_secret() -> Result<[u8; 16], String> {
    token::random_bytes().map_err(|error| error.to_string())
}

/// One end of the transfers between this process and others.
pub struct Endpoint {
    runtime: Handle,
    units: Units,
    /// Bytes of the largest unit that is ever sent or received.
    largest_unit: usize,
    sender: Arc<Sender>,
    pub(crate) reservations: Arc<Reservations>,
    listener: Listener,
    pub(crate) role: Role,
}

impl Endpoint {
    /// Creates the end of a leader, or of a worker without a group. Must be called inside a Tokio runtime. `network`
    /// connects to other workers, and `outbox` leads to the conductor. `wake` wakes the engine.
    pub fn leader(
        units: Units,
        network: Network,
        outbox: &mpsc::Sender<pb::WorkerMessage>,
        wake: impl Fn() + Clone + Send + Sync + 'static,
    ) -> (Arc<Self>, StreamConnector) {
        let (queue, inbox) = mpsc::channel(QUEUED_EVENTS);
        let ranks = units.share.is_share().then(|| Arc::new(Ranks::new(units.share.clone(), group_secret())));
        let events = Events::new(queue, wake.clone());
        let role = Role::Leader(Leader { events, ranks, outbox: outbox.downgrade() });
        let largest_unit = units.largest();
        let endpoint = Self::new(Handle::current(), units, largest_unit, network, role);
        endpoint.runtime.spawn(Arc::clone(&endpoint.sender.staging).wake_when_freed(wake));
        (Arc::clone(&endpoint), StreamConnector::new(endpoint, inbox))
    }

    /// Returns the connector of a rank that follows a leader and has no transfer yet.
    pub fn follower(
        group_rank: GroupRank,
        hosts: Hosts,
        layout: &PageLayout,
        load: watch::Sender<pb::WorkerLoad>,
        runtime: &Handle,
    ) -> StreamConnector {
        let units = Units::new(layout, group_rank, 0);
        let (largest_unit, network) = (units.share.largest_unit(), hosts.own.clone());
        let role = Role::Follower(Arc::new(Follower::new(group_rank, hosts, load)));
        // A follower has no engine, so this queue stays empty.
        let (_, inbox) = mpsc::channel(1);
        StreamConnector::new(Self::new(runtime.clone(), units, largest_unit, network, role), inbox)
    }

    fn new(runtime: Handle, units: Units, largest_unit: usize, network: Network, role: Role) -> Arc<Self> {
        Arc::new(Self {
            runtime,
            units,
            largest_unit,
            sender: Arc::new(Sender::new(largest_unit, network.clone())),
            reservations: Arc::default(),
            listener: Listener::at(network),
            role,
        })
    }

    /// Registers a graph that is about to be launched. `to_send` is the kind and the number of the units that the graph
    /// sends, if it has a destination.
    pub fn launched(self: &Arc<Self>, graph: &pb::LaunchGraph, to_send: (UnitKind, usize)) {
        let Some(key) = graph.key.map(GraphKey::from) else { return };
        // At most one of `receive` and `receive_media` is set: only a prefill uses embeddings, and only a graph without
        // a prefill receives planes.
        if let Some(reservation) = graph.receive.as_ref().or(graph.receive_media.as_ref()) {
            self.reservations.expect(key, reservation);
        }
        if let Some(destination) = &graph.send_to {
            let (kind, count) = to_send;
            let is_shared = self.units.share.is_shared_with(destination.ranks.len() + 1);
            match self.ranks_for(kind).filter(|_| is_shared) {
                Some(ranks) => self.push_shares(ranks, key, destination, count),
                None => {
                    self.push(key, destination.clone(), self.units.of(kind, Extent::Whole).clone(), count)
                }
            }
        }
    }

    /// Counts of all transfers so far; `None` if there were none.
    pub fn counts(&self) -> Option<pb::TransferCounts> {
        let counts = self.sender.counts.message();
        (counts != pb::TransferCounts::default()).then_some(counts)
    }

    /// The other ranks of a leader's group.
    fn ranks(&self) -> Option<&Arc<Ranks>> {
        match &self.role {
            Role::Leader(leader) => leader.ranks.as_ref(),
            Role::Follower(_) => None,
        }
    }

    /// The other ranks, if they hold shares of this kind of units. Only the leader exchanges embeddings.
    fn ranks_for(&self, kind: UnitKind) -> Option<&Arc<Ranks>> {
        self.ranks().filter(|_| kind != UnitKind::Embeddings)
    }

    /// Starts the pushes of the shares of all ranks.
    fn push_shares(
        self: &Arc<Self>,
        ranks: &Arc<Ranks>,
        key: GraphKey,
        to: &pb::PlaneDestination,
        count: usize,
    ) {
        if let Some(why) = ranks.lost() {
            let role = self.role.clone();
            self.runtime.spawn(async move { role.failed(key, TransferError::Lost(why)).await });
            return;
        }
        let push = pb::PushShare { key: Some(key.into()), to: Some(to.clone()), count: count as u32 };
        self.order(ranks, key, Order::Push(push));
        self.push(key, to.clone(), self.units.share.clone(), count);
    }

    /// Queues an order to the other ranks. After the first order, queues another order that tells the ranks the port
    /// for their reports.
    fn order(self: &Arc<Self>, ranks: &Arc<Ranks>, key: GraphKey, order: Order) {
        let Role::Leader(Leader { events, .. }) = &self.role else { return };
        if ranks.order(key, order) {
            let (endpoint, ranks, events) = (Arc::clone(self), Arc::clone(ranks), events.clone());
            self.runtime.spawn(async move {
                match endpoint.address().await {
                    Ok(address) => ranks.order_reports(address),
                    Err(error) => {
                        tracing::error!(%error, "cannot listen for the reports of the group's ranks")
                    }
                }
                events.wake();
            });
        }
    }

    /// Starts the task that pushes `count` pages or rows of a request, and its slot.
    fn push(
        self: &Arc<Self>,
        key: GraphKey,
        destination: pb::PlaneDestination,
        layout: UnitLayout,
        count: usize,
    ) {
        let Some(push) = self.sender.begin(key, destination, layout, count) else { return };
        let endpoint = Arc::clone(self);
        self.runtime.spawn(async move {
            let outcome = endpoint.sender.run(key, push).await;
            endpoint.role.counted(endpoint.sender.counts.message());
            if let Some(outcome) = outcome {
                endpoint.role.pushed(key, outcome).await;
            }
        });
    }

    /// Opens a request's space at this rank to the sender. If other ranks hold shares of the space, orders them to open
    /// theirs.
    fn reserve(self: &Arc<Self>, key: GraphKey, space: Space) {
        let Some(reservation) = self.reservations.hold(key, space.clone()) else { return };
        if let Some(ranks) = self.ranks().filter(|_| space.share.is_some()) {
            let pb::PlaneReservation { secret, lease_ms } = reservation.clone();
            let (count, known) = (space.count as u32, space.known as u32);
            let reserve = pb::ReserveShare { key: Some(key.into()), secret, lease_ms, count, known };
            self.order(ranks, key, Order::Reserve(reserve));
        }
        self.runtime.spawn(Arc::clone(self).offer(key, space, reservation));
    }

    /// Announces reserved space. Then waits until the reservation ends or its lease expires.
    async fn offer(self: Arc<Self>, key: GraphKey, space: Space, reservation: pb::PlaneReservation) {
        let lost = |why| self.role.failed(key, TransferError::Lost(why));
        let (port, socket) = match self.address().await {
            Ok(address) => address.into_fields(),
            Err(error) => return lost(format!("cannot listen for planes: {error}")).await,
        };
        let segment = Segment::offer(&reservation.secret, space.layout.bytes(space.count));
        let shared_memory = segment.map_or_else(String::new, |segment| {
            let path = segment.path();
            self.reservations.set_segment(key, segment);
            path
        });
        let room = pb::RankRoom { port, shared_memory, socket };
        match &self.role {
            Role::Leader(leader) => {
                let lease = Duration::from_millis(reservation.lease_ms.into());
                let ranks = match leader.ranks.as_ref().filter(|_| space.share.is_some()) {
                    None => Vec::new(),
                    Some(ranks) => match ranks.rooms(key, lease).await {
                        Ok(rooms) => rooms,
                        Err(why) => return lost(why).await,
                    },
                };
                // The lease starts again, because the ranks may have taken long to answer, and no sender could have
                // come in the meantime.
                self.reservations.renew(key);
                leader.announce(key, &space, room, ranks).await;
            }
            Role::Follower(follower) => {
                follower
                    .report(Report::Held(pb::ShareRoom { key: Some(key.into()), room: Some(room) }))
                    .await;
            }
        }
        if let Some(lease) = self.reservations.expired(key).await {
            let why = format!("its sender was silent for {lease:?}");
            tracing::warn!(%key, why, "a reservation for planes has expired");
            lost(why).await;
        }
    }

    /// Opens the listener for senders on first use, and keeps it open until the process ends. Returns its address.
    async fn address(&self) -> io::Result<ServiceAddress> {
        let services = || {
            let (reservations, role) = (Arc::clone(&self.reservations), self.role.clone());
            let reports = match &self.role {
                Role::Leader(Leader { events, ranks: Some(ranks), .. }) => Some(Reports {
                    ranks: Arc::clone(ranks),
                    sender: Arc::clone(&self.sender),
                    reservations: Arc::clone(&reservations),
                    events: events.clone(),
                }),
                _ => None,
            };
            let counts = Arc::clone(&self.sender.counts);
            (Receiver { reservations, role, counts }, reports)
        };
        self.listener.address(&self.runtime, self.largest_unit, services).await
    }

    /// Forgets a request that has ended on this worker.
    fn end(&self, key: GraphKey) {
        self.sender.close(key);
        self.reservations.end(key);
        self.role.ended(key);
    }
}
