//! The sending side: one task per request that is prefilled or encoded here for another worker, from its launch to the
//! receiver's answer.

use std::{
    collections::HashMap,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, transport::Channel};
use tutti_engine::{ExportSummary, OutputToken, PageRun, TransferError};
use tutti_kernels::collective::GroupRank;
use tutti_proto::cluster::v1::{
    self as pb, plane_data::Place, plane_piece::Piece, plane_transfer_client::PlaneTransferClient,
};

use crate::network::Network;

use super::{
    KEEP_ALIVE, WINDOW_BYTES,
    freight::Freight,
    segment::Segment,
    staging::{Parcel, Queue},
    tally::{Tally, Transport},
};

/// Maximum number of messages that wait between a push's task and its stream.
const IN_FLIGHT: usize = 2;
/// Maximum number of times that a hand-over is repeated after its answer was lost.
const RETRIES: usize = 3;
/// Maximum number of receivers whose connections are kept.
const MAX_CONNECTIONS: usize = 64;

/// Connections to receivers, opened on first use and again after a failure.
pub(super) struct Connections {
    network: Network,
    open: Mutex<HashMap<String, Connection>>,
}

struct Connection {
    channel: Channel,
    /// Transport that was last logged.
    logged: Option<Transport>,
}

impl Connections {
    pub fn new(network: Network) -> Self {
        Self { network, open: Mutex::default() }
    }

    fn to(&self, address: &str) -> Result<Channel, TransferError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(connection) = open.get(address) {
            return Ok(connection.channel.clone());
        }
        let dial = self.network.dial(address).map_err(|e| TransferError::Refused(e.to_string()))?;
        let channel = dial
            .tuned(|endpoint| {
                endpoint
                    .initial_stream_window_size(WINDOW_BYTES)
                    .http2_keep_alive_interval(KEEP_ALIVE)
                    .keep_alive_timeout(KEEP_ALIVE)
                    .tcp_nodelay(true)
            })
            .connect_lazy();
        if open.len() == MAX_CONNECTIONS {
            open.clear();
        }
        open.insert(address.to_owned(), Connection { channel: channel.clone(), logged: None });
        Ok(channel)
    }

    /// Logs the transport to a receiver whenever the transport changes.
    fn log_transport(&self, address: &str, transport: Transport) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(connection) = open.get_mut(address) else { return };
        if connection.logged.replace(transport) != Some(transport) {
            tracing::info!(receiver = address, transport = transport.name(), "sending planes");
        }
    }
}

/// A push of one request's units.
pub(super) struct Push {
    pub destination: pb::PlaneDestination,
    pub freight: Freight,
    /// Number of the request's pages of the prefill, or embedding rows of the media.
    pub count: usize,
    pub queue: Arc<Queue>,
    pub connections: Arc<Connections>,
    pub tally: Arc<Tally>,
}

/// Progress of a push.
#[derive(Default)]
struct Progress {
    /// Time at which the first unit could be sent.
    began: Option<Instant>,
    /// Set once all units and the hand-over are in the stream.
    summary: Option<ExportSummary>,
}

impl Push {
    /// Runs until the receiver accepts the request or the push fails. Returns `None` if the request ends on this worker
    /// earlier.
    pub async fn run(self) -> Option<Result<(), TransferError>> {
        let mut progress = Progress::default();
        let mut outcome = self.attempt(&mut progress).await;
        for _ in 0..RETRIES {
            let (Err(TransferError::Lost(why)), Some(summary)) = (&outcome, progress.summary) else { break };
            tracing::debug!(why, "repeating a hand-over whose answer was lost");
            outcome = self.resend_end(summary).await.map(Some);
        }
        match outcome {
            Ok(None) => return None,
            Ok(Some(())) => {
                if let Some(summary) = progress.summary {
                    let exposed = summary.since.elapsed();
                    // Pages of a short prompt are staged only after the prefill has ended, so the time of the push
                    // counts from the prefill's end at the latest.
                    let pushing = progress.began.map_or(exposed, |began| began.elapsed().max(exposed));
                    self.tally.record_handover(pushing, exposed);
                }
            }
            Err(_) => self.tally.record_failure(),
        }
        Some(outcome.map(|_| ()))
    }

    fn lease(&self) -> Duration {
        Duration::from_millis(self.destination.lease_ms.into())
    }

    fn client(&self) -> Result<PlaneTransferClient<Channel>, TransferError> {
        let channel = self.connections.to(&self.destination.address)?;
        Ok(PlaneTransferClient::new(channel)
            .max_encoding_message_size(super::message_bytes(self.freight.largest_unit())))
    }

    /// Makes one attempt to push all units and the hand-over. Returns `None` if the request has ended on this worker.
    async fn attempt(&self, progress: &mut Progress) -> Result<Option<()>, TransferError> {
        let (pieces, outbound) = mpsc::channel(IN_FLIGHT);
        let mut client = self.client()?;
        let mut call = pin!(client.push(ReceiverStream::new(outbound)));
        let sent = tokio::select! {
            answered = &mut call => {
                return Err(answered.map_or_else(from_status, |_| {
                    TransferError::Refused("the receiver has answered before the hand-over".to_owned())
                }));
            }
            sent = self.send_all(pieces, progress) => sent?,
        };
        let Some(summary) = sent else { return Ok(None) };
        self.await_receipt(call, &summary).await.map(Some)
    }

    /// Repeats the hand-over without the units. The receiver may have accepted the hand-over already.
    async fn resend_end(&self, summary: ExportSummary) -> Result<(), TransferError> {
        let (pieces, outbound) = mpsc::channel(IN_FLIGHT);
        let mut client = self.client()?;
        for piece in [self.manifest(), hand_over_piece(&summary)] {
            // The result is ignored: sending cannot fail, because the channel has room for both pieces.
            let _ = pieces.try_send(pb::PlanePiece { piece: Some(piece) });
        }
        drop(pieces);
        let outcome = self.await_receipt(pin!(client.push(ReceiverStream::new(outbound))), &summary).await;
        outcome.map_err(|error| match error {
            TransferError::Refused(why) => TransferError::Lost(format!("pages were lost on the way: {why}")),
            lost => lost,
        })
    }

    async fn await_receipt(
        &self,
        call: impl Future<Output = Result<tonic::Response<pb::TransferReceipt>, Status>>,
        summary: &ExportSummary,
    ) -> Result<(), TransferError> {
        let late = || TransferError::Lost(format!("the receiver has not answered within {:?}", self.lease()));
        let receipt =
            timeout(self.lease(), call).await.map_err(|_| late())?.map_err(from_status)?.into_inner();
        let same = receipt.computed_tokens as usize == summary.computed
            && receipt.counts == counts(summary)
            && receipt.key == self.destination.key;
        if same { Ok(()) } else { Err(TransferError::Refused(format!("unexpected receipt: {receipt:?}"))) }
    }

    /// Sends the manifest, then the units as they are staged, then the hand-over. Returns `None` if the request has
    /// ended on this worker.
    async fn send_all(
        &self,
        pieces: mpsc::Sender<pb::PlanePiece>,
        progress: &mut Progress,
    ) -> Result<Option<ExportSummary>, TransferError> {
        let outlet = Outlet { pieces, lease: self.lease() };
        outlet.send(self.manifest()).await?;
        let segment = self.open_segment().await;
        let transport = if segment.is_some() { Transport::SharedMemory } else { Transport::Tcp };
        self.connections.log_transport(&self.destination.address, transport);
        loop {
            let parcel = match timeout(self.lease() / 3, self.queue.next()).await {
                Err(_) => {
                    outlet.send(Piece::Renewal(pb::LeaseRenewal {})).await?;
                    continue;
                }
                Ok(None) => return Ok(None),
                Ok(Some(parcel)) => parcel,
            };
            match parcel {
                Parcel::Pages(staged) => {
                    progress.began.get_or_insert_with(Instant::now);
                    self.tally.record_sent(transport, staged.run.data.len());
                    match &segment {
                        Some(segment) => self.send_shared(&outlet, segment, staged).await?,
                        None => self.send_inline(&outlet, &staged.run).await?,
                    }
                }
                Parcel::End(summary) => {
                    outlet.send(hand_over_piece(&summary)).await?;
                    progress.summary = Some(summary);
                    return Ok(Some(summary));
                }
            }
        }
    }

    fn manifest(&self) -> Piece {
        let pb::PlaneDestination { key, secret, .. } = self.destination.clone();
        let (layout_hash, counts) = (self.freight.layout_id, self.freight.counts(self.count));
        let planes = self.freight.planes.to_vec();
        let GroupRank { rank, world_size } = self.freight.share;
        let (rank, ranks) = (rank as u32, world_size as u32);
        Piece::Manifest(pb::TransferManifest { key, secret, layout_hash, counts, planes, ranks, rank })
    }

    /// Opens the receiver's segment if the receiver is on this host.
    async fn open_segment(&self) -> Option<Arc<Segment>> {
        let pb::PlaneDestination { shared_memory, secret, .. } = self.destination.clone();
        if shared_memory.is_empty() {
            return None;
        }
        let opened =
            tokio::task::spawn_blocking(move || Segment::open(&shared_memory, &secret)).await.ok()?;
        match opened {
            Ok(segment) => Some(Arc::new(segment)),
            Err(error) => {
                tracing::debug!(%error, "the receiver's segment is not on this host; sending bytes");
                None
            }
        }
    }

    async fn send_shared(
        &self,
        outlet: &Outlet,
        segment: &Arc<Segment>,
        staged: super::staging::Staged,
    ) -> Result<(), TransferError> {
        let (cargo, first, length) = (staged.run.cargo, staged.run.first, staged.run.data.len());
        let offset = self.freight.offset_of(cargo, first, self.count);
        if !segment.holds(offset, length as u64) {
            // The two workers differ in the size of a page, so the receiver refuses the push. The refusal arrives
            // during this sleep and replaces the error below, which says less.
            tokio::time::sleep(self.lease()).await;
            return Err(TransferError::Lost("the receiver's segment has no room for these pages".to_owned()));
        }
        let segment = Arc::clone(segment);
        let written = tokio::task::spawn_blocking(move || segment.write(offset, &staged.run.data)).await;
        let lost =
            |why: String| TransferError::Lost(format!("cannot write to the receiver's segment: {why}"));
        written.map_err(|e| lost(e.to_string()))?.map_err(|e| lost(e.to_string()))?;
        let place = Some(Place::Shared(pb::SharedRange { offset, length: length as u64 }));
        let count = (length / self.freight.bytes_of(cargo).max(1)) as u32;
        let cargo = Freight::index_of(cargo);
        outlet.send(Piece::Data(pb::PlaneData { cargo, first: first as u32, count, place })).await
    }

    async fn send_inline(&self, outlet: &Outlet, run: &PageRun) -> Result<(), TransferError> {
        let (bytes, at_once) = (self.freight.bytes_of(run.cargo).max(1), self.freight.at_once(run.cargo));
        let cargo = Freight::index_of(run.cargo);
        for (index, data) in run.data.chunks(at_once * bytes).enumerate() {
            let first = (run.first + index * at_once) as u32;
            let count = (data.len() / bytes) as u32;
            let place = Some(Place::Inline(data.to_vec()));
            outlet.send(Piece::Data(pb::PlaneData { cargo, first, count, place })).await?;
        }
        Ok(())
    }
}

/// The stream to the receiver. Sending fails if the receiver takes nothing within `lease`.
struct Outlet {
    pieces: mpsc::Sender<pb::PlanePiece>,
    lease: Duration,
}

impl Outlet {
    async fn send(&self, piece: Piece) -> Result<(), TransferError> {
        match timeout(self.lease, self.pieces.send(pb::PlanePiece { piece: Some(piece) })).await {
            Ok(Ok(())) => Ok(()),
            // The stream is closed. Waits forever, because `attempt` then ends with the call's error, which says why
            // the stream is closed.
            Ok(Err(_)) => std::future::pending().await,
            Err(_) => {
                Err(TransferError::Lost(format!("the receiver has taken nothing for {:?}", self.lease)))
            }
        }
    }
}

fn hand_over_piece(summary: &ExportSummary) -> Piece {
    let ExportSummary { first, computed, .. } = *summary;
    let sampled =
        |first: OutputToken| pb::SampledToken { token_id: first.token, index: first.index, logprob: None };
    Piece::HandOver(pb::HandOver {
        first: first.map(sampled),
        computed_tokens: computed as u32,
        counts: counts(summary),
    })
}

/// Number of units of each cargo, as messages state them.
pub(super) fn counts(summary: &ExportSummary) -> Vec<u32> {
    let slots = (summary.slots > 0).then_some(summary.slots as u32);
    std::iter::once(summary.pages as u32).chain(slots).collect()
}

/// Converts a receiver's status into an error: `Refused` if the receiver rejects what it was sent, else `Lost`.
fn from_status(status: Status) -> TransferError {
    let message = format!("the receiver says: {}", status.message());
    match status.code() {
        Code::Unauthenticated | Code::FailedPrecondition | Code::InvalidArgument => {
            TransferError::Refused(message)
        }
        _ => TransferError::Lost(message),
    }
}
