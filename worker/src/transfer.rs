//! Transfer of requests that are divided between workers. Planes go from the worker that prefills to the worker that
//! decodes. Embeddings go from the worker that encodes to the worker that prefills.
//!
//! ```text
//! prefilling worker                                              decoding worker
//! engine ─▶ staging ─▶ sender (task per request) ══ Push ══▶ receiver (gRPC) ─▶ engine
//!                         └──────────▶ segment of shared memory ─────┘
//! ```
//!
//! - Pages and rows of embeddings are handled alike, as units of fixed size that are counted from 0. The slot of a
//!   request, in models that have slot planes, is one more unit. [`Freight`] says which units a transfer carries.
//! - Engines copy pages between steps and between layers, and exchange them with this module through
//!   [`tutti_engine::Courier`]. The tasks of this module run on other threads than the steps.
//! - On one host, pages go through a [`segment`] and the stream carries their offsets. Between hosts, the stream
//!   carries the pages. The sender chooses: if it can open the receiver's segment, it uses the segment.
//! - Both sides have the same time limit, the lease. A receiver frees its pages if its sender is silent for the whole
//!   lease ([`reservations`]). A sender gives up if its receiver takes nothing for the whole lease.
//! - In a TP group, a transfer from or to a group of as many ranks is one of shares: each rank pushes its own share,
//!   and takes its own ([`rank`]). The leader decides what is sent and written, and learns of the rest by reports
//!   ([`rank_reports`]). Between groups of unlike sizes, the leaders alone push whole pages.
//! - Staged bytes are bounded ([`staging`]). A request whose pages are computed faster than they are sent waits; other
//!   requests do not.

mod freight;
#[cfg(fuzzing)]
pub mod fuzzing;
mod group_ranks;
mod listener;
mod pushes;
mod rank;
mod rank_reports;
mod receiver;
mod reservations;
mod segment;
mod sender;
mod share_store;
mod staging;
mod tally;
#[cfg(test)]
mod tests;

use std::{
    fs::File,
    io::{self, Read},
    sync::Arc,
    time::Duration,
};

use tokio::{runtime::Handle, sync::mpsc};
use tutti_engine::{Arrival, Cargo, Courier, EngineHandle, ExportSummary, PageRun, TransferError, Waker};
use tutti_kernels::collective::GroupRank;
use tutti_proto::{
    GraphKey,
    cluster::v1::{self as pb, rank_order::Order, worker_message::Message as ToConductor},
};

use crate::network::Network;

pub use self::rank::{RankHosts, RankTransfer};
use self::{
    freight::Freight,
    group_ranks::GroupRanks,
    listener::Listener,
    pushes::Pushes,
    rank_reports::ReportReceiver,
    receiver::{Receiver, Taker},
    reservations::{Reservations, ReservedSpace},
    segment::Segment,
};

/// Maximum bytes of units per message, unless one unit is larger.
const FRAME_BYTES: usize = 1 << 20;
/// Maximum number of arrivals that wait for the engine. Further arrivals wait in their streams.
const QUEUED_ARRIVALS: usize = 16;
/// Flow control window of one stream in bytes: a few messages.
const WINDOW_BYTES: u32 = 4 << 20;
/// Maximum number of concurrent pushes on one sender's connection. Further pushes wait on the sender's side.
const MAX_STREAMS: u32 = 1024;
/// Interval between keep-alive pings, and time limit for the answer to a ping.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Maximum bytes of a message apart from its units.
const ENVELOPE_BYTES: usize = 4096;

/// Largest message of a stream, in bytes.
fn message_bytes(unit_bytes: usize) -> usize {
    FRAME_BYTES.max(unit_bytes) + ENVELOPE_BYTES
}

/// A worker's side of all transfers.
#[derive(Clone)]
pub struct Transfer {
    hub: Arc<Hub>,
}

struct Hub {
    runtime: Handle,
    waker: Waker,
    planes: Freight,
    embeddings: Freight,
    /// The other ranks of this worker's group; `None` if it works alone.
    ranks: Option<Arc<GroupRanks>>,
    arrivals: mpsc::Sender<Arrival>,
    /// Weak, because a strong sender would keep the outbox open. The closed outbox tells the conductor that the worker
    /// has ended.
    outbox: mpsc::WeakSender<pb::WorkerMessage>,
    pushes: Arc<Pushes>,
    reservations: Arc<Reservations>,
    listener: Listener,
}

impl Transfer {
    /// Allows requests to be divided between this worker and others. Must be called inside a Tokio runtime.
    /// `network` is the way to other workers.
    pub fn connect(
        engine: &mut EngineHandle,
        outbox: &mpsc::Sender<pb::WorkerMessage>,
        network: Network,
    ) -> Self {
        let (planes, embeddings) =
            (Freight::of_planes(engine), Freight::of_embeddings(engine.embedding_width()));
        let (arrivals, inbox) = mpsc::channel(QUEUED_ARRIVALS);
        let hub = Arc::new(Hub {
            runtime: Handle::current(),
            waker: engine.waker(),
            pushes: Arc::new(Pushes::new(
                planes.largest_unit().max(embeddings.largest_unit()),
                network.clone(),
            )),
            ranks: group_ranks(engine).map(Arc::new),
            planes,
            embeddings,
            arrivals,
            outbox: outbox.downgrade(),
            reservations: Arc::default(),
            listener: Listener::at(network),
        });
        engine.connect(Box::new(TransferCourier { hub: Arc::clone(&hub), inbox }));
        hub.runtime.spawn(Arc::clone(&hub.pushes.staging).wake_when_freed(hub.waker.clone()));
        Self { hub }
    }

    /// Registers a graph that is about to be launched.
    pub fn launched(&self, graph: &pb::LaunchGraph, engine: &EngineHandle) {
        let Some(key) = graph.key.map(GraphKey::from) else { return };
        // At most one of `receive` and `receive_media` is set: a graph that waits for planes needs no embeddings, since
        // only a prefill uses embeddings.
        if let Some(reservation) = graph.receive.as_ref().or(graph.receive_media.as_ref()) {
            self.hub.reservations.expect(key, reservation);
        }
        if let Some(destination) = &graph.send_to {
            let (cargo, count) = engine.units_to_send(graph);
            match self.hub.ranks_for(cargo).filter(|ranks| ranks.is_shared_with(destination.ranks.len())) {
                Some(ranks) => self.hub.push_shares(ranks, key, destination, count),
                None => self.hub.push(key, destination.clone(), self.hub.freight(cargo).clone(), count),
            }
        }
    }

    /// Counts of all transfers so far; `None` if there were none.
    pub fn tally(&self) -> Option<pb::TransferTally> {
        let tally = self.hub.pushes.tally.message();
        (tally != pb::TransferTally::default()).then_some(tally)
    }
}

/// The other ranks of an engine's group. `None` for an engine that works alone.
fn group_ranks(engine: &EngineHandle) -> Option<GroupRanks> {
    let layout = engine.share_layout();
    if layout.ranks == 1 {
        return None;
    }
    let mut secret = [0; 16];
    let read = File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut secret));
    let secret = read.map(|()| secret).map_err(|e| format!("cannot read /dev/urandom: {e}"));
    let leader = GroupRank { rank: 0, world_size: layout.ranks };
    Some(GroupRanks::new(layout, Freight::of_share(engine.page_layout(), leader), secret))
}

impl Hub {
    fn freight(&self, cargo: Cargo) -> &Freight {
        match cargo {
            Cargo::Pages | Cargo::Slot => &self.planes,
            Cargo::Embeddings => &self.embeddings,
        }
    }

    /// The group's ranks, if they have shares of a cargo. Embeddings are the leader's alone.
    fn ranks_for(&self, cargo: Cargo) -> Option<&Arc<GroupRanks>> {
        self.ranks.as_ref().filter(|_| cargo != Cargo::Embeddings)
    }

    /// Starts the pushes of the shares of all ranks.
    fn push_shares(
        self: &Arc<Self>,
        ranks: &Arc<GroupRanks>,
        key: GraphKey,
        to: &pb::PlaneDestination,
        count: usize,
    ) {
        if let Some(why) = ranks.lost() {
            let hub = Arc::clone(self);
            let failed = Arrival::Failed(key, TransferError::Lost(why));
            self.runtime.spawn(async move { hub.deliver(failed).await });
            return;
        }
        let push = pb::PushShare { key: Some(key.into()), to: Some(to.clone()), count: count as u32 };
        self.order(ranks, key, Order::Push(push));
        self.push(key, to.clone(), ranks.freight.clone(), count);
    }

    /// Queues an order to the other ranks. The first order lets them report here.
    fn order(self: &Arc<Self>, ranks: &Arc<GroupRanks>, key: GraphKey, order: Order) {
        if ranks.order(key, order) {
            let (hub, ranks) = (Arc::clone(self), Arc::clone(ranks));
            self.runtime.spawn(async move {
                match hub.port().await {
                    Ok(port) => ranks.order_reports(port),
                    Err(error) => {
                        tracing::error!(%error, "cannot listen for the reports of the group's ranks")
                    }
                }
                hub.waker.wake();
            });
        }
    }

    /// Starts the task that pushes `count` pages or rows of a request, and its slot.
    fn push(
        self: &Arc<Self>,
        key: GraphKey,
        destination: pb::PlaneDestination,
        freight: Freight,
        count: usize,
    ) {
        let Some(push) = self.pushes.begin(key, destination, freight, count) else { return };
        let hub = Arc::clone(self);
        self.runtime.spawn(async move {
            let Some(outcome) = hub.pushes.run(key, push).await else { return };
            hub.deliver(match outcome {
                Ok(()) => {
                    hub.ranks.iter().for_each(|ranks| ranks.handed_over(key));
                    Arrival::Accepted(key)
                }
                Err(error) => {
                    tracing::info!(%key, %error, "planes did not get across");
                    hub.ranks.iter().for_each(|ranks| ranks.forget(key));
                    Arrival::Failed(key, error)
                }
            })
            .await;
        });
    }

    async fn deliver(&self, arrival: Arrival) {
        // Sending fails only if the engine has ended, and then there is nothing to wake.
        if self.arrivals.send(arrival).await.is_ok() {
            self.waker.wake();
        }
    }

    /// Announces reserved space to the conductor, and then waits until the reservation ends or its lease expires.
    async fn offer(self: Arc<Self>, key: GraphKey, space: ReservedSpace, secret: Vec<u8>, lease: Duration) {
        let lost = |why| self.deliver(Arrival::Failed(key, TransferError::Lost(why)));
        let ReservedSpace { freight, count, known, share, .. } = space;
        let port = match self.port().await {
            Ok(port) => port.into(),
            Err(error) => return lost(format!("cannot listen for planes: {error}")).await,
        };
        let shared_memory =
            Segment::offer(&secret, freight.bytes(count)).map_or_else(String::new, |segment| {
                let path = segment.path();
                self.reservations.set_segment(key, segment);
                path
            });
        let ranks = match self.ranks.as_ref().filter(|_| share.is_some()) {
            None => Ok(Vec::new()),
            Some(ranks) => ranks.rooms(key, lease).await,
        };
        let ranks = match ranks {
            Ok(ranks) => ranks,
            Err(why) => return lost(why).await,
        };
        // Ranks may have taken long to answer, and no sender could come before.
        self.reservations.renew(key);
        let (layout_hash, known_pages) = (freight.layout_id, known as u32);
        let reserved =
            pb::Reserved { key: Some(key.into()), port, layout_hash, shared_memory, known_pages, ranks };
        let message = pb::WorkerMessage { message: Some(ToConductor::Reserved(reserved)) };
        let Some(outbox) = self.outbox.upgrade() else { return };
        if outbox.send(message).await.is_err() {
            return;
        }
        drop(outbox);
        if let Some(lease) = self.reservations.expired(key).await {
            let why = format!("its sender was silent for {lease:?}");
            tracing::warn!(%key, why, "a reservation for planes has expired");
            lost(why).await;
        }
    }

    /// Listens for senders as long as the process lives. Returns the port.
    async fn port(&self) -> io::Result<u16> {
        let services = || {
            let (arrivals, waker) = (self.arrivals.clone(), self.waker.clone());
            let reservations = Arc::clone(&self.reservations);
            let reports = self.ranks.clone().map(|ranks| ReportReceiver {
                ranks,
                pushes: Arc::clone(&self.pushes),
                reservations: Arc::clone(&reservations),
                arrivals: arrivals.clone(),
                waker: waker.clone(),
            });
            (Receiver { reservations, taker: Taker::Engine { arrivals, waker } }, reports)
        };
        let largest = self.planes.largest_unit().max(self.embeddings.largest_unit());
        self.listener.port(&self.runtime, largest, services).await
    }
}

/// The engine's side of transfers.
struct TransferCourier {
    hub: Arc<Hub>,
    inbox: mpsc::Receiver<Arrival>,
}

impl Courier for TransferCourier {
    fn room(&self) -> usize {
        let own = self.hub.pushes.staging.left();
        self.hub.ranks.as_ref().map_or(own, |ranks| ranks.left().min(own))
    }

    fn send(&mut self, run: PageRun) {
        // The engine learns of a failed push from an `Arrival::Failed`.
        self.hub.pushes.put(run);
    }

    fn send_share(&mut self, run: PageRun) {
        self.hub.ranks.iter().for_each(|ranks| ranks.staged(run.data.len()));
        self.send(run);
    }

    fn export(&mut self, key: GraphKey, summary: ExportSummary) {
        if let Some(ranks) = &self.hub.ranks {
            let (computed_tokens, counts) = (summary.computed as u32, sender::counts(&summary));
            ranks.order_end(key, pb::EndShare { key: Some(key.into()), computed_tokens, counts });
        }
        self.hub.pushes.put_end(key, summary);
    }

    fn reserved(&mut self, key: GraphKey, cargo: Cargo, count: usize, known: usize) {
        let (hub, freight) = (&self.hub, self.hub.freight(cargo).clone());
        let ranks = hub.ranks_for(cargo).filter(|ranks| ranks.lost().is_none());
        let share = ranks.map(|ranks| ranks.freight.clone());
        let space = ReservedSpace { freight, share, count, known, segment: None };
        let Some(secret) = hub.reservations.hold(key, space.clone()) else { return };
        let Some((_, lease)) = hub.reservations.lease_until(key) else { return };
        if let Some(ranks) = ranks {
            let (secret, lease_ms) = (secret.clone(), lease.as_millis() as u32);
            let (count, known) = (count as u32, known as u32);
            let reserve = pb::ReserveShare { key: Some(key.into()), secret, lease_ms, count, known };
            hub.order(ranks, key, Order::Reserve(reserve));
        }
        hub.runtime.spawn(Arc::clone(hub).offer(key, space, secret, lease));
    }

    fn ended(&mut self, key: GraphKey) {
        self.hub.pushes.close(key);
        self.hub.reservations.end(key);
        self.hub.ranks.iter().for_each(|ranks| ranks.forget(key));
    }

    fn orders(&mut self) -> Vec<pb::RankOrder> {
        self.hub.ranks.as_ref().map_or_else(Vec::new, |ranks| ranks.take_orders())
    }

    fn take(&mut self) -> Option<Arrival> {
        self.inbox.try_recv().ok()
    }
}
