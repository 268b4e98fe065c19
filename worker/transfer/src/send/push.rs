//! A push: the task of one request that this worker prefills or encodes for another worker. A push lasts from the
//! request's launch to the receiver's answer.

use std::{io, ops::Range, pin::pin, sync::Arc, time::Duration};

use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Status, transport::Channel};
use tutti_kernels::collective::GroupRank;
use tutti_proto::cluster::v1::{
    self as pb, plane_data::Place, plane_piece::Piece, plane_transfer_client::PlaneTransferClient,
};
use tutti_scheduler::TransferError;

use super::{
    connections::Connections,
    counts::{TransferCounts, Transport},
    staging::{Queue, Queued, Staged},
};
use crate::{
    HandOver, Run, UnitLayout,
    checksum::{self, seal},
    credential,
    segment::Segment,
};

/// Maximum number of messages that wait between a push's task and its stream.
const IN_FLIGHT: usize = 2;
/// Maximum number of times that a hand-over is repeated after its answer was lost.
const RETRIES: usize = 3;
/// A push of one request's units.
pub(crate) struct Push {
    pub destination: pb::PlaneDestination,
    pub layout: UnitLayout,
    /// Number of pages of the request's prefill, or of embedding rows of its media.
    pub count: usize,
    pub queue: Arc<Queue>,
    pub connections: Arc<Connections>,
    pub counts: Arc<TransferCounts>,
}

/// Progress of a push.
#[derive(Default)]
struct Progress {
    /// Time at which the first unit could be sent.
    began: Option<Instant>,
    /// The hand-over, and the time of the last commit. Set once all units and the hand-over are in the stream.
    end: Option<(HandOver, std::time::Instant)>,
}

impl Push {
    /// Runs until the receiver accepts the request or the push fails. Returns `None` if the request has ended on this
    /// worker first.
    pub async fn run(self) -> Option<Result<(), TransferError>> {
        let mut progress = Progress::default();
        let mut outcome = self.attempt(&mut progress).await;
        for _ in 0..RETRIES {
            let (Err(TransferError::Lost(why)), Some((hand_over, _))) = (&outcome, progress.end) else {
                break;
            };
            tracing::debug!(why, "repeating a hand-over whose answer was lost");
            outcome = self.resend_end(hand_over).await.map(Some);
        }
        match outcome {
            Ok(None) => return None,
            Ok(Some(())) => {
                if let Some((_, since)) = progress.end {
                    let exposed = since.elapsed();
                    // The pages of a short prompt are staged only after the prefill has ended. The time of the push
                    // therefore counts from the end of the prefill, if that was earlier than the first unit.
                    let pushing = progress.began.map_or(exposed, |began| began.elapsed().max(exposed));
                    self.counts.record_handover(pushing, exposed);
                }
            }
            Err(_) => self.counts.record_failure(),
        }
        Some(outcome.map(|_| ()))
    }

    fn lease(&self) -> Duration {
        Duration::from_millis(self.destination.lease_ms.into())
    }

    fn client(&self) -> Result<PlaneTransferClient<Channel>, TransferError> {
        let channel = self.connections.to(&self.destination.address)?;
        Ok(PlaneTransferClient::new(channel)
            .max_encoding_message_size(crate::message_bytes(self.layout.largest_unit())))
    }

    /// Makes one attempt to push all units and the hand-over. Returns `None` if the request has ended on this worker.
    async fn attempt(&self, progress: &mut Progress) -> Result<Option<()>, TransferError> {
        let (pieces, outbound) = mpsc::channel(IN_FLIGHT);
        let mut client = self.client()?;
        let mut call = pin!(client.push(self.request(outbound)));
        let sent = tokio::select! {
            answered = &mut call => {
                return Err(answered.map_or_else(from_status, |_| {
                    TransferError::Refused("the receiver has answered before the hand-over".to_owned())
                }));
            }
            sent = self.send_all(pieces, progress) => sent?,
        };
        let Some(hand_over) = sent else { return Ok(None) };
        self.await_receipt(call, &hand_over).await.map(Some)
    }

    /// Repeats the hand-over without the units. The receiver may have accepted the hand-over already.
    async fn resend_end(&self, hand_over: HandOver) -> Result<(), TransferError> {
        let (pieces, outbound) = mpsc::channel(IN_FLIGHT);
        let mut client = self.client()?;
        for piece in [self.manifest(), Piece::HandOver(hand_over.message())] {
            // The result is ignored: sending cannot fail, because the channel has room for both pieces.
            let _ = pieces.try_send(pb::PlanePiece { piece: Some(seal(piece)) });
        }
        drop(pieces);
        let outcome = self.await_receipt(pin!(client.push(self.request(outbound))), &hand_over).await;
        outcome.map_err(|error| match error {
            TransferError::Refused(why) => TransferError::Lost(format!("pages were lost on the way: {why}")),
            lost => lost,
        })
    }

    async fn await_receipt(
        &self,
        call: impl Future<Output = Result<tonic::Response<pb::TransferReceipt>, Status>>,
        hand_over: &HandOver,
    ) -> Result<(), TransferError> {
        let late = || TransferError::Lost(format!("the receiver has not answered within {:?}", self.lease()));
        let receipt =
            timeout(self.lease(), call).await.map_err(|_| late())?.map_err(from_status)?.into_inner();
        let same = receipt.computed_tokens as usize == hand_over.computed
            && receipt.counts == hand_over.counts()
            && receipt.key == self.destination.key;
        if same { Ok(()) } else { Err(TransferError::Refused(format!("unexpected receipt: {receipt:?}"))) }
    }

    /// Sends the manifest, then the units as they are staged, then the hand-over. Returns `None` if the request has
    /// ended on this worker.
    async fn send_all(
        &self,
        pieces: mpsc::Sender<pb::PlanePiece>,
        progress: &mut Progress,
    ) -> Result<Option<HandOver>, TransferError> {
        self.put(&pieces, self.manifest()).await?;
        let segment = self.open_segment().await;
        let transport = if segment.is_some() { Transport::SharedMemory } else { Transport::Tcp };
        self.connections.log_transport(&self.destination.address, transport);
        loop {
            match timeout(self.lease() / 3, self.queue.next()).await {
                Err(_) => self.put(&pieces, Piece::Renewal(pb::LeaseRenewal {})).await?,
                Ok(None) => return Ok(None),
                Ok(Some(Queued::Run(staged))) => {
                    progress.began.get_or_insert_with(Instant::now);
                    self.counts.record_sent(transport, staged.data.len());
                    match &segment {
                        Some(segment) => self.send_shared(&pieces, segment, staged).await?,
                        None => self.send_inline(&pieces, &staged).await?,
                    }
                }
                Ok(Some(Queued::End(hand_over, since))) => {
                    self.put(&pieces, Piece::HandOver(hand_over.message())).await?;
                    progress.end = Some((hand_over, since));
                    return Ok(Some(hand_over));
                }
            }
        }
    }

    /// Puts a piece into the stream, with its checksum. Fails if the stream has no room during the whole lease, because
    /// the receiver takes nothing.
    async fn put(&self, pieces: &mpsc::Sender<pb::PlanePiece>, piece: Piece) -> Result<(), TransferError> {
        match timeout(self.lease(), pieces.send(pb::PlanePiece { piece: Some(seal(piece)) })).await {
            Ok(Ok(())) => Ok(()),
            // The stream is closed. Waits forever: `attempt` ends this call with the error of the gRPC call, which says
            // why the stream is closed.
            Ok(Err(_)) => std::future::pending().await,
            Err(_) => {
                Err(TransferError::Lost(format!("the receiver has taken nothing for {:?}", self.lease())))
            }
        }
    }

    /// The call that sends these pieces and shows the secret of the reservation.
    fn request(&self, pieces: mpsc::Receiver<pb::PlanePiece>) -> Request<ReceiverStream<pb::PlanePiece>> {
        let key = self.destination.key.unwrap_or_default().into();
        credential::push(ReceiverStream::new(pieces), key, &self.destination.secret)
    }

    fn manifest(&self) -> Piece {
        let (layout_hash, counts) = (self.layout.id, self.layout.counts(self.count));
        let planes = self.layout.planes.to_vec();
        let GroupRank { rank, world_size } = self.layout.share;
        let (rank, ranks) = (rank as u32, world_size as u32);
        let sender = self.destination.sender;
        Piece::Manifest(pb::TransferManifest {
            layout_hash,
            counts,
            planes,
            ranks,
            rank,
            sender,
            checksum: 0,
        })
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
        pieces: &mpsc::Sender<pb::PlanePiece>,
        segment: &Arc<Segment>,
        staged: Staged,
    ) -> Result<(), TransferError> {
        let (run, length) = (staged.run, staged.data.len());
        let offset = self.layout.offset_of(run.kind, run.first, self.count);
        if !segment.holds(offset, length as u64) {
            // The two workers differ in the size of a page, so the receiver refuses the push. Its refusal arrives
            // during this sleep and replaces the less precise error below.
            tokio::time::sleep(self.lease()).await;
            return Err(TransferError::Lost("the receiver's segment has no room for these pages".to_owned()));
        }
        let (segment, chunks) = (Arc::clone(segment), self.chunks_of(run, length));
        let write = move || {
            let mut offset = offset;
            let write = |chunk: Chunk| -> io::Result<pb::PlaneData> {
                // Each chunk is in the processor's cache when it is copied.
                let data = &staged.data[chunk.bytes.clone()];
                let mut message =
                    chunk.message(Place::Shared(pb::SharedRange { offset, length: data.len() as u64 }));
                message.checksum = checksum::of_units(message.kind, message.first, message.count, data);
                segment.write(offset, data)?;
                offset += data.len() as u64;
                Ok(message)
            };
            chunks.into_iter().map(write).collect::<Result<Vec<_>, _>>()
        };
        let lost =
            |why: String| TransferError::Lost(format!("cannot write to the receiver's segment: {why}"));
        let written = tokio::task::spawn_blocking(write).await;
        for message in written.map_err(|e| lost(e.to_string()))?.map_err(|e| lost(e.to_string()))? {
            self.put(pieces, Piece::Data(message)).await?;
        }
        Ok(())
    }

    async fn send_inline(
        &self,
        pieces: &mpsc::Sender<pb::PlanePiece>,
        Staged { run, data, .. }: &Staged,
    ) -> Result<(), TransferError> {
        for chunk in self.chunks_of(*run, data.len()) {
            let place = Place::Inline(data[chunk.bytes.clone()].to_vec());
            self.put(pieces, Piece::Data(chunk.message(place))).await?;
        }
        Ok(())
    }

    /// Divides a run of `length` bytes into chunks of one message each.
    fn chunks_of(&self, run: Run, length: usize) -> Vec<Chunk> {
        let (unit_bytes, at_once) = (self.layout.bytes_of(run.kind).max(1), self.layout.at_once(run.kind));
        let chunk = |start: usize| {
            let bytes = start..length.min(start + at_once * unit_bytes);
            let (first, count) = (run.first + start / unit_bytes, bytes.len() / unit_bytes);
            Chunk { run: Run { first, count, ..run }, bytes }
        };
        (0..length).step_by(at_once * unit_bytes).map(chunk).collect()
    }
}

/// Units of one message.
struct Chunk {
    run: Run,
    /// Range of the units in the bytes of the staged run.
    bytes: Range<usize>,
}

impl Chunk {
    fn message(&self, place: Place) -> pb::PlaneData {
        let Run { kind, first, count, .. } = self.run;
        let (first, count, place) = (first as u32, count as u32, Some(place));
        pb::PlaneData { kind: kind.index(), first, count, place, checksum: 0 }
    }
}

/// Converts a receiver's status into an error: `Refused` if the receiver rejects the data, else `Lost`.
fn from_status(status: Status) -> TransferError {
    let message = format!("the receiver says: {}", status.message());
    match status.code() {
        Code::Unauthenticated | Code::FailedPrecondition | Code::InvalidArgument => {
            TransferError::Refused(message)
        }
        _ => TransferError::Lost(message),
    }
}

#[cfg(test)]
mod tests;
