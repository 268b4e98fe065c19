//! The receiving side: accepts pushes whose [credential](crate::credential) has been checked, and passes their units to
//! the engine, or to the store of a rank that follows its leader.
//!
//! A sender's input is checked before it is used: the length of a message before the message is read, and the range and
//! length of a run before the run is passed on. Data that the engine has not taken stays in the stream, and the
//! stream's flow control makes the sender wait.

mod listener;
mod reservations;

use std::sync::Arc;

use tokio::{sync::oneshot, time::interval};
use tonic::{Request, Response, Status, Streaming, service::interceptor::InterceptedService};
use tutti_kernels::collective::GroupRank;
use tutti_proto::{
    GraphKey,
    cluster::v1::{
        self as pb,
        plane_data::Place,
        plane_piece::Piece,
        plane_transfer_server::{PlaneTransfer, PlaneTransferServer},
    },
};
use tutti_runtime::{Error, ErrorKind};
use tutti_scheduler::TransferError;

use self::reservations::Found;
pub(crate) use self::{
    listener::Listener,
    reservations::{Reservations, Space},
};
use crate::{
    Event, Extent, HandOver, Import, Run, UnitKind,
    checksum::{self, Checked},
    credential::{self, Check},
    endpoint::{Follower, Leader, Role},
    send::TransferCounts,
};

/// The gRPC service that pushes call.
pub(crate) struct Receiver {
    pub reservations: Arc<Reservations>,
    pub role: Role,
    pub counts: Arc<TransferCounts>,
}

#[tonic::async_trait]
impl PlaneTransfer for Receiver {
    async fn push(
        &self,
        request: Request<Streaming<pb::PlanePiece>>,
    ) -> Result<Response<pb::TransferReceipt>, Status> {
        let key = request.extensions().get::<GraphKey>().copied();
        let key = key.ok_or_else(|| Status::internal("the sender's secret was not checked"))?;
        let mut pieces = request.into_inner();
        let Some(Piece::Manifest(manifest)) = next(&mut pieces).await? else {
            return Err(Status::invalid_argument("the first message is not a manifest"));
        };
        if !manifest.is_sound() {
            return Err(self.corrupt(key, format!("the manifest of {key} is corrupt")).await);
        }
        let mut space = match self.reservations.find(key)? {
            Found::Imported(imported) => return acknowledge_again(key, &imported, &mut pieces).await,
            Found::Waiting(space) => space,
        };
        // A sender without a group states no number of ranks.
        let ranks = manifest.ranks.max(1);
        if !space.choose(GroupRank { rank: manifest.rank as usize, world_size: ranks as usize }) {
            let message = format!("the share of rank {} of {ranks} is none of those here", manifest.rank);
            return Err(Status::failed_precondition(message));
        }
        let (layout_id, name) = (space.layout.id, space.layout.name());
        if let Some(difference) = space.layout.difference(&manifest.planes) {
            return Err(Status::failed_precondition(difference));
        }
        if manifest.layout_hash != layout_id {
            let (theirs, ours) = (manifest.layout_hash, layout_id);
            let message = format!("the sender's {name} are of layout {theirs:x}, those here of {ours:x}");
            return Err(Status::failed_precondition(message));
        }
        let reserved = space.layout.counts(space.count);
        if manifest.counts != reserved {
            let (counts, slots) = (&manifest.counts, if reserved.len() > 1 { " and slots" } else { "" });
            let reserved: Vec<String> = reserved.iter().map(u32::to_string).collect();
            let reserved = reserved.join(" and ");
            let message = format!("{counts:?} {name}{slots} are announced, but {reserved} are reserved");
            return Err(Status::failed_precondition(message));
        }
        let sender = sender_of(&manifest);
        while let Some(piece) = next(&mut pieces).await? {
            if !self.reservations.renew(key) {
                return Err(Status::aborted(self.reservations.why_gone(key)));
            }
            match piece {
                Piece::Data(data) => {
                    let units = space.layout.describe(&data);
                    let Some((run, data)) = self.read(key, &space, data).await? else {
                        let why =
                            format!("{units} of {key} from {sender} are corrupt: the checksum is wrong");
                        return Err(self.corrupt(key, why).await);
                    };
                    self.role.arrived(run, data).await?;
                }
                Piece::Renewal(_) => {}
                Piece::HandOver(hand_over) if hand_over.is_sound() => {
                    return self.import(key, &space, hand_over).await;
                }
                Piece::HandOver(_) => {
                    let why = format!("the hand-over of {key} from {sender} is corrupt");
                    return Err(self.corrupt(key, why).await);
                }
                Piece::Manifest(_) => return Err(Status::invalid_argument("a second manifest")),
            }
        }
        Err(Status::cancelled("the stream has ended before the hand-over"))
    }
}

impl Receiver {
    /// Returns the service, with a check of its callers' credentials in front. `message_bytes` is the length of the
    /// longest message.
    pub fn into_service(
        self,
        message_bytes: usize,
    ) -> InterceptedService<PlaneTransferServer<Self>, impl Check> {
        let check = credential::check_push(Arc::clone(&self.reservations));
        let service = PlaneTransferServer::new(self).max_decoding_message_size(message_bytes);
        InterceptedService::new(service, check)
    }

    /// Fails a transfer because something has changed on the way, and returns the answer for its sender. The request
    /// starts over.
    async fn corrupt(&self, key: GraphKey, why: String) -> Status {
        self.counts.record_corrupt();
        self.role.counted(self.counts.message());
        tracing::warn!(%key, why, "a transfer has arrived corrupt");
        // The sender may ask again, and gets the same reason. If the reservation has ended, nothing waits for the
        // units.
        if self.reservations.fail(key, why.clone()) {
            self.role.failed(key, TransferError::Lost(why.clone())).await;
        }
        Status::data_loss(why)
    }

    /// Reads a run of units. Returns none if it is not the one that the sender sent.
    async fn read(
        &self,
        key: GraphKey,
        space: &Space,
        data: pb::PlaneData,
    ) -> Result<Option<(Run, Vec<u8>)>, Status> {
        let pb::PlaneData { kind: index, first: at, count: units, place, checksum } = data;
        let is_sound = |bytes: &[u8]| checksum::of_units(index, at, units, bytes) == checksum;
        // Checked first, because a range that has changed on the way is not the sender's mistake.
        if let Some(Place::Inline(bytes)) = &place
            && !is_sound(bytes)
        {
            return Ok(None);
        }
        let (first, count, layout) = (at as usize, units as usize, &space.layout);
        let Some(kind) = layout.kind_of(index) else {
            return Err(Status::failed_precondition(format!(
                "units of kind {index} are not in this transfer"
            )));
        };
        let to_fill = match kind {
            UnitKind::Slot => 0..1,
            UnitKind::Pages | UnitKind::Embeddings => space.known..space.count,
        };
        let name = if kind == UnitKind::Slot { "slots" } else { layout.name() };
        if count == 0 || first < to_fill.start || first.saturating_add(count) > to_fill.end {
            let message = format!("{count} {name} from {first} on, but {to_fill:?} are to be filled");
            return Err(Status::failed_precondition(message));
        }
        let extent = if layout.is_share() { Extent::Share } else { Extent::Whole };
        let run = Run { key, kind, extent, first, count };
        let unit_bytes = layout.bytes_of(kind);
        let wanted = count * unit_bytes;
        let wrong_length = |length: u64| {
            Status::failed_precondition(format!("{length} bytes for {count} {name}, which take {wanted}"))
        };
        let data = match place {
            Some(Place::Inline(data)) if data.len() == wanted => data,
            Some(Place::Inline(data)) => return Err(wrong_length(data.len() as u64)),
            Some(Place::Shared(range)) if range.length != wanted as u64 => {
                return Err(wrong_length(range.length));
            }
            // The bytes are read at once, so that exactly those are checked that are used.
            Some(Place::Shared(_)) if count > layout.at_once(kind) => {
                let most = layout.at_once(kind);
                let message = format!("{count} {name} in one message, which holds {most} at most");
                return Err(Status::failed_precondition(message));
            }
            Some(Place::Shared(pb::SharedRange { offset, length })) => {
                let segment = space.segment.as_ref().filter(|segment| segment.holds(offset, length));
                let segment = segment.ok_or_else(|| {
                    Status::failed_precondition(format!("{length} bytes at {offset} are not in the segment"))
                })?;
                let segment = Arc::clone(segment);
                let read = tokio::task::spawn_blocking(move || segment.read(offset, wanted)).await;
                let data = read
                    .map_err(|_| Status::unavailable("the worker is ending"))?
                    .map_err(|e| Status::unavailable(format!("cannot read the segment: {e}")))?;
                if !is_sound(&data) {
                    return Ok(None);
                }
                data
            }
            None => return Err(Status::invalid_argument("pages without bytes")),
        };
        Ok(Some((run, data)))
    }

    async fn import(
        &self,
        key: GraphKey,
        space: &Space,
        message: pb::HandOver,
    ) -> Result<Response<pb::TransferReceipt>, Status> {
        let hand_over = HandOver::of_message(&message)
            .ok_or_else(|| Status::invalid_argument("a hand-over counts units of one or two kinds"))?;
        match &self.role {
            Role::Follower(follower) => self.complete_share(follower, key, space, message).await,
            Role::Leader(leader) => {
                if message.first.is_some() != (space.layout.kind == UnitKind::Pages) {
                    return Err(Status::invalid_argument(
                        "a hand-over has a first token if and only if it ends pages",
                    ));
                }
                self.continue_request(leader, key, hand_over, message).await
            }
        }
    }

    /// Checks that a share is complete. The leader decides whether the request continues.
    async fn complete_share(
        &self,
        follower: &Follower,
        key: GraphKey,
        space: &Space,
        message: pb::HandOver,
    ) -> Result<Response<pb::TransferReceipt>, Status> {
        let complete = follower.store.complete(key, &space.layout, &message).await;
        // A sender that repeats the hand-over gets this reason again.
        if let Err(status) = &complete {
            self.reservations.fail(key, status.message().to_owned());
        }
        complete?;
        let receipt = receipt(key, &message);
        self.reservations.accept(key, message);
        Ok(receipt)
    }

    /// Asks the engine to continue a request, and waits for its answer.
    async fn continue_request(
        &self,
        leader: &Leader,
        key: GraphKey,
        hand_over: HandOver,
        message: pb::HandOver,
    ) -> Result<Response<pb::TransferReceipt>, Status> {
        let (answer, mut answered) = oneshot::channel();
        let (reservations, imported) = (Arc::clone(&self.reservations), message.clone());
        let answer = Box::new(move |outcome: Result<(), Error>| {
            // The hand-over is recorded before the engine runs the request, so that it is remembered even if the
            // request ends soon.
            if outcome.is_ok() {
                reservations.accept(key, imported);
            }
            // Ignored: sending fails only if the sender has disconnected. The sender then repeats the hand-over.
            let _ = answer.send(outcome);
        });
        leader.events.deliver(Event::Import(Import { key, hand_over, answer })).await?;
        let Some((_, lease)) = self.reservations.lease_until(key) else {
            return self.acknowledge(key, &message, answered.await.ok());
        };
        // The lease is renewed while the engine prepares its answer, so that the engine's delay does not count as
        // silence of the sender.
        let mut pace = interval(lease / 3);
        loop {
            tokio::select! {
                outcome = &mut answered => return self.acknowledge(key, &message, outcome.ok()),
                _ = pace.tick() => self.reservations.renew(key),
            };
        }
    }

    fn acknowledge(
        &self,
        key: GraphKey,
        hand_over: &pb::HandOver,
        outcome: Option<Result<(), Error>>,
    ) -> Result<Response<pb::TransferReceipt>, Status> {
        match outcome {
            Some(Ok(())) => Ok(receipt(key, hand_over)),
            Some(Err(error)) if error.kind() == ErrorKind::InvalidArgument => {
                Err(Status::failed_precondition(error.message()))
            }
            // The engine answers with an error only if it does not wait for this request.
            Some(Err(_)) => Err(Status::not_found(self.reservations.why_gone(key))),
            None => Err(Status::unavailable("the worker is ending")),
        }
    }
}

/// Answers a sender that repeats a hand-over. The request already continues on this worker, so no state changes. Fails
/// if the repeated hand-over differs from the accepted one.
async fn acknowledge_again(
    key: GraphKey,
    imported: &pb::HandOver,
    pieces: &mut Streaming<pb::PlanePiece>,
) -> Result<Response<pb::TransferReceipt>, Status> {
    while let Some(piece) = next(pieces).await? {
        match piece {
            Piece::HandOver(hand_over) if hand_over == *imported => return Ok(receipt(key, imported)),
            Piece::HandOver(_) => {
                return Err(Status::failed_precondition(format!(
                    "{key} was accepted with another hand-over"
                )));
            }
            Piece::Data(_) | Piece::Renewal(_) | Piece::Manifest(_) => {}
        }
    }
    Err(Status::cancelled("the stream has ended before the hand-over"))
}

/// The sender of a push, for messages.
fn sender_of(manifest: &pb::TransferManifest) -> String {
    let pb::TransferManifest { sender, ranks, rank, .. } = manifest;
    if *ranks > 1 { format!("rank {rank} of worker {sender}") } else { format!("worker {sender}") }
}

fn receipt(key: GraphKey, hand_over: &pb::HandOver) -> Response<pb::TransferReceipt> {
    let pb::HandOver { computed_tokens, counts, .. } = hand_over;
    let (key, computed_tokens, counts) = (Some(key.into()), *computed_tokens, counts.clone());
    Response::new(pb::TransferReceipt { key, computed_tokens, counts })
}

async fn next(pieces: &mut Streaming<pb::PlanePiece>) -> Result<Option<Piece>, Status> {
    match pieces.message().await? {
        None => Ok(None),
        Some(pb::PlanePiece { piece: Some(piece) }) => Ok(Some(piece)),
        Some(_) => Err(Status::invalid_argument("a message of unknown kind")),
    }
}
