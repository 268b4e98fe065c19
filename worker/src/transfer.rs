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
//! - Staged bytes are bounded ([`staging`]). A request whose pages are computed faster than they are sent waits; other
//!   requests do not.

mod freight;
mod receiver;
mod reservations;
mod segment;
mod sender;
mod staging;
mod tally;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    io,
    net::Ipv4Addr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    net::TcpListener,
    runtime::Handle,
    sync::{OnceCell, mpsc},
    time::{Instant, sleep_until},
};
use tonic::transport::{Server, server::TcpIncoming};
use tutti_engine::{Arrival, Cargo, Courier, EngineHandle, ExportSummary, PageRun, TransferError, Waker};
use tutti_proto::{
    GraphKey,
    cluster::v1::{
        self as pb, plane_transfer_server::PlaneTransferServer, worker_message::Message as ToConductor,
    },
};

use self::{
    freight::Freight,
    receiver::Receiver,
    reservations::Reservations,
    segment::Segment,
    sender::{Connections, Push},
    staging::{Queue, StagingBudget},
    tally::Tally,
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
    arrivals: mpsc::Sender<Arrival>,
    /// Weak, because a strong sender would keep the outbox open. The closed outbox tells the conductor that the worker
    /// has ended.
    outbox: mpsc::WeakSender<pb::WorkerMessage>,
    staging: Arc<StagingBudget>,
    sending: Mutex<HashMap<GraphKey, Arc<Queue>>>,
    reservations: Arc<Reservations>,
    connections: Arc<Connections>,
    tally: Arc<Tally>,
    /// Port on which the receiver listens; unset until the first use starts the receiver.
    port: OnceCell<u16>,
}

impl Transfer {
    /// Allows requests to be divided between this worker and others. Must be called inside a Tokio runtime.
    pub fn connect(engine: &mut EngineHandle, outbox: &mpsc::Sender<pb::WorkerMessage>) -> Self {
        let (planes, embeddings) =
            (Freight::of_planes(engine), Freight::of_embeddings(engine.embedding_width()));
        let (arrivals, inbox) = mpsc::channel(QUEUED_ARRIVALS);
        let hub = Arc::new(Hub {
            runtime: Handle::current(),
            waker: engine.waker(),
            staging: Arc::new(StagingBudget::new(planes.largest_unit().max(embeddings.largest_unit()))),
            planes,
            embeddings,
            arrivals,
            outbox: outbox.downgrade(),
            sending: Mutex::default(),
            reservations: Arc::default(),
            connections: Arc::default(),
            tally: Arc::default(),
            port: OnceCell::new(),
        });
        engine.connect(Box::new(TransferCourier { hub: Arc::clone(&hub), inbox }));
        hub.runtime.spawn(Arc::clone(&hub.staging).wake_when_freed(hub.waker.clone()));
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
            self.hub.push(key, destination.clone(), self.hub.freight(cargo).clone(), count);
        }
    }

    /// Counts of all transfers so far; `None` if there were none.
    pub fn tally(&self) -> Option<pb::TransferTally> {
        let tally = self.hub.tally.message();
        (tally != pb::TransferTally::default()).then_some(tally)
    }
}

impl Hub {
    fn sending(&self) -> MutexGuard<'_, HashMap<GraphKey, Arc<Queue>>> {
        self.sending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn freight(&self, cargo: Cargo) -> &Freight {
        match cargo {
            Cargo::Pages | Cargo::Slot => &self.planes,
            Cargo::Embeddings => &self.embeddings,
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
        let queue = Arc::new(Queue::new(Arc::clone(&self.staging)));
        let mut sending = self.sending();
        if sending.contains_key(&key) {
            return;
        }
        sending.insert(key, Arc::clone(&queue));
        drop(sending);
        let push = Push {
            destination,
            freight,
            count,
            queue,
            connections: Arc::clone(&self.connections),
            tally: Arc::clone(&self.tally),
        };
        let hub = Arc::clone(self);
        self.runtime.spawn(async move {
            let Some(outcome) = push.run().await else { return };
            // Drops units that are still staged, since nothing will send them.
            let queue = hub.sending().remove(&key);
            queue.iter().for_each(|queue| queue.close());
            hub.deliver(match outcome {
                Ok(()) => Arrival::Accepted(key),
                Err(error) => {
                    tracing::info!(%key, %error, "planes did not get across");
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
    async fn offer(self: Arc<Self>, key: GraphKey, space: reservations::ReservedSpace, secret: Vec<u8>) {
        let reservations::ReservedSpace { freight, count, known, .. } = space;
        let port = match self.port.get_or_try_init(|| self.serve()).await {
            Ok(port) => *port,
            Err(error) => {
                let why = format!("cannot listen for planes: {error}");
                return self.deliver(Arrival::Failed(key, TransferError::Lost(why))).await;
            }
        };
        let shared_memory = match Segment::create(&secret, freight.bytes(count)) {
            Ok(segment) => {
                let path = segment.path();
                self.reservations.set_segment(key, segment);
                path
            }
            Err(error) => {
                tracing::warn!(%key, %error, "no shared memory; planes come as bytes");
                String::new()
            }
        };
        let reserved = pb::Reserved {
            key: Some(key.into()),
            port: port.into(),
            layout_hash: freight.layout_id,
            shared_memory,
            known_pages: known as u32,
        };
        let message = pb::WorkerMessage { message: Some(ToConductor::Reserved(reserved)) };
        let Some(outbox) = self.outbox.upgrade() else { return };
        if outbox.send(message).await.is_err() {
            return;
        }
        drop(outbox);
        while let Some((until, lease)) = self.reservations.lease_until(key) {
            if Instant::now() < until {
                sleep_until(until).await;
                continue;
            }
            self.reservations.end(key);
            let why = format!("its sender was silent for {lease:?}");
            tracing::warn!(%key, why, "a reservation for planes has expired");
            return self.deliver(Arrival::Failed(key, TransferError::Lost(why))).await;
        }
    }

    /// Listens for senders as long as the process lives. Returns the port.
    async fn serve(&self) -> io::Result<u16> {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await?;
        let port = listener.local_addr()?.port();
        let receiver = Receiver {
            reservations: Arc::clone(&self.reservations),
            arrivals: self.arrivals.clone(),
            waker: self.waker.clone(),
        };
        let longest = message_bytes(self.planes.largest_unit().max(self.embeddings.largest_unit()));
        let service = PlaneTransferServer::new(receiver).max_decoding_message_size(longest);
        let server = Server::builder()
            .max_concurrent_streams(MAX_STREAMS)
            .http2_keepalive_interval(Some(KEEP_ALIVE))
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(4 * WINDOW_BYTES)
            .add_service(service);
        // Without nodelay, an answer of two TCP segments waits for the sender's delayed acknowledgement (about 40 ms).
        // The setting of `Server` would apply only to listeners that the server opens itself.
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        self.runtime.spawn(async move {
            if let Err(error) = server.serve_with_incoming(incoming).await {
                tracing::error!(%error, "no longer listens for planes");
            }
        });
        tracing::info!(port, "listens for planes");
        Ok(port)
    }
}

/// The engine's side of transfers.
struct TransferCourier {
    hub: Arc<Hub>,
    inbox: mpsc::Receiver<Arrival>,
}

impl Courier for TransferCourier {
    fn room(&self) -> usize {
        self.hub.staging.left()
    }

    fn send(&mut self, run: PageRun) {
        let queue = self.hub.sending().get(&run.key).cloned();
        // The run is dropped if the request has no queue any more, because its push has then ended. The engine learns
        // of a failed push from an `Arrival::Failed`.
        if let Some(queue) = queue {
            queue.put_pages(run);
        }
    }

    fn export(&mut self, key: GraphKey, summary: ExportSummary) {
        let queue = self.hub.sending().get(&key).cloned();
        if let Some(queue) = queue {
            queue.put_end(summary);
        }
    }

    fn reserved(&mut self, key: GraphKey, cargo: Cargo, count: usize, known: usize) {
        let freight = self.hub.freight(cargo).clone();
        let space = reservations::ReservedSpace { freight, count, known, segment: None };
        if let Some(secret) = self.hub.reservations.hold(key, space.clone()) {
            self.hub.runtime.spawn(Arc::clone(&self.hub).offer(key, space, secret));
        }
    }

    fn ended(&mut self, key: GraphKey) {
        let queue = self.hub.sending().remove(&key);
        queue.iter().for_each(|queue| queue.close());
        self.hub.reservations.end(key);
    }

    fn take(&mut self) -> Option<Arrival> {
        self.inbox.try_recv().ok()
    }
}
