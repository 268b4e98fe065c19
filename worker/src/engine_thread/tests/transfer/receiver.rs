//! Tests of the receiving side with senders that are wrong, broken, late or duplicated.

use std::{fs::OpenOptions, os::unix::fs::FileExt};

use tokio_stream::{iter, pending};
use tonic::{Code, Status, transport::Channel};
use tutti_proto::cluster::v1::{
    plane_data::Place, plane_piece::Piece, plane_transfer_client::PlaneTransferClient,
};
use tutti_runtime::token::Token;
use tutti_transfer::checksum::seal;

use super::*;

const PAGE_BYTES: usize = 16 * 8;

/// A sender under the test's control.
struct Sender {
    client: PlaneTransferClient<Channel>,
    graph: Option<String>,
    secret: Vec<u8>,
    manifest: pb::TransferManifest,
}

impl Sender {
    async fn of(reserved: &pb::Reserved) -> Self {
        let address = format!("http://127.0.0.1:{}", reserved.port);
        Self {
            client: PlaneTransferClient::connect(address).await.unwrap(),
            graph: Some(GraphKey::from(reserved.key.unwrap()).to_string()),
            secret: secret().into(),
            manifest: pb::TransferManifest {
                layout_hash: reserved.layout_hash,
                counts: vec![PAGES as u32],
                planes: vec![plane("kv", PAGE_BYTES)],
                sender: 7,
                ..Default::default()
            },
        }
    }

    async fn push(&mut self, pieces: Vec<Piece>) -> Result<pb::TransferReceipt, Status> {
        let manifest = Piece::Manifest(self.manifest.clone());
        self.send([vec![manifest], pieces].concat()).await
    }

    async fn send(&mut self, pieces: Vec<Piece>) -> Result<pb::TransferReceipt, Status> {
        self.send_unsealed(pieces.into_iter().map(seal).collect()).await
    }

    /// Sends pieces with the checksums that they have.
    async fn send_unsealed(&mut self, pieces: Vec<Piece>) -> Result<pb::TransferReceipt, Status> {
        let pieces = pieces.into_iter().map(|piece| pb::PlanePiece { piece: Some(piece) });
        let call = self.client.push(shown(iter(pieces.collect::<Vec<_>>()), &self.graph, &self.secret));
        timeout(WAIT, call).await.expect("no answer").map(tonic::Response::into_inner)
    }

    /// Error code that a sender receives if it sends nothing after its metadata.
    async fn says_nothing(&mut self) -> Code {
        let call = self.client.push(shown(pending::<pb::PlanePiece>(), &self.graph, &self.secret));
        timeout(WAIT, call).await.expect("the call is held").unwrap_err().code()
    }

    /// Error code after a push with a changed manifest.
    async fn announce(&mut self, change: impl FnOnce(&mut pb::TransferManifest)) -> Code {
        let right = self.manifest.clone();
        change(&mut self.manifest);
        let answer = self.push(vec![pages(0, PAGES), hand_over_piece()]).await;
        self.manifest = right;
        answer.unwrap_err().code()
    }
}

/// A call that names a graph and shows a secret.
fn shown<T>(pieces: T, graph: &Option<String>, secret: &[u8]) -> tonic::Request<T> {
    let mut request = tonic::Request::new(pieces);
    Token::of_bytes(secret).add_to(request.metadata_mut().as_mut());
    if let Some(graph) = graph {
        request.metadata_mut().insert("tutti-graph", graph.parse().unwrap());
    }
    request
}

fn plane(name: &str, unit_bytes: usize) -> pb::TransferPlane {
    pb::TransferPlane { name: name.into(), unit_bytes: unit_bytes as u64 }
}

fn pages(first: usize, count: usize) -> Piece {
    run(first, count, Place::Inline(vec![1; count * PAGE_BYTES]))
}

fn run(first: usize, count: usize, place: Place) -> Piece {
    let (first, count, place) = (first as u32, count as u32, Some(place));
    Piece::Data(pb::PlaneData { first, count, place, ..Default::default() })
}

fn hand_over_message(first: u32) -> pb::HandOver {
    pb::HandOver {
        first: Some(pb::SampledToken { token_id: first, index: 0, logprob: None }),
        computed_tokens: PROMPT as u32,
        counts: vec![PAGES as u32],
        checksum: 0,
    }
}

fn hand_over_piece() -> Piece {
    Piece::HandOver(hand_over_message(5))
}

fn code(answer: Result<pb::TransferReceipt, Status>) -> Code {
    answer.unwrap_err().code()
}

#[tokio::test]
async fn a_sender_without_a_manifest_is_waited_for_as_the_settings_say() {
    let connections = ConnectionSettings { receive_timeout_ms: 200, ..ConnectionSettings::default() };
    let network = Network { connections, ..LOCALHOST.into() };
    let mut worker = Worker::reached_by(network, model(&shipped(), 16, None), None);
    let mut sender = Sender::of(&worker.reserve(1, 60_000).await).await;
    let call = sender.client.push(shown(pending::<pb::PlanePiece>(), &sender.graph, &sender.secret));
    // This limit is shorter than the default `receive_timeout_ms`, so the test notices if the setting is ignored.
    let answer = timeout(Duration::from_secs(15), call).await.expect("the call is held");
    assert_eq!(answer.unwrap_err().code(), Code::DeadlineExceeded);
}

#[tokio::test]
async fn only_the_reserved_push_is_accepted() {
    let mut to = Worker::start();
    let mut sender = Sender::of(&to.reserve(1, 60_000).await).await;
    // The metadata alone decides: no sender of this loop sends a message.
    for secret in [vec![0; 16], secret()[..15].to_vec(), vec![]] {
        sender.secret = secret;
        assert_eq!(sender.says_nothing().await, Code::Unauthenticated);
    }
    sender.secret = secret().into();
    let right = sender.graph.replace("1.1.1".into());
    assert_eq!(sender.says_nothing().await, Code::NotFound);
    for graph in [None, Some("1.1".to_owned())] {
        sender.graph = graph;
        assert_eq!(sender.says_nothing().await, Code::InvalidArgument);
    }
    sender.graph = right;
    assert_eq!(sender.announce(|manifest| manifest.layout_hash ^= 1).await, Code::FailedPrecondition);
    assert_eq!(sender.announce(|manifest| manifest.counts = vec![4]).await, Code::FailedPrecondition);
    assert_eq!(sender.announce(|manifest| manifest.counts.push(5)).await, Code::FailedPrecondition);
    for (planes, named) in [
        (vec![], "lacks plane \"kv\""),
        (vec![plane("kv", PAGE_BYTES), plane("state", 8)], "no plane \"state\""),
        (vec![plane("kv", PAGE_BYTES + 8)], "plane \"kv\" has units of"),
    ] {
        let right = std::mem::replace(&mut sender.manifest.planes, planes);
        let refused = sender.push(vec![pages(0, PAGES), hand_over_piece()]).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(refused.message().contains(named), "{refused}");
        sender.manifest.planes = right;
    }
    assert_eq!(code(sender.send(vec![pages(0, PAGES), hand_over_piece()]).await), Code::InvalidArgument);
    // The reservation still waits for a correct sender.
    sender.push(vec![pages(0, PAGES), hand_over_piece()]).await.unwrap();
    assert_eq!(to.ends().await.0.len(), 11);
}

#[tokio::test]
async fn missing_misplaced_or_wrongly_sized_pages_are_an_error() {
    let mut to = Worker::start();
    let reserved = to.reserve(1, 60_000).await;
    let mut sender = Sender::of(&reserved).await;
    let shared = |offset: u64, length: u64| Place::Shared(pb::SharedRange { offset, length });
    for wrong in [
        run(0, 1, Place::Inline(vec![1; PAGE_BYTES - 1])),
        run(0, 2, Place::Inline(vec![1; PAGE_BYTES])),
        pages(4, 2),
        pages(u32::MAX as usize, 1),
        run(0, 0, Place::Inline(vec![])),
        run(0, PAGES, shared(PAGE_BYTES as u64, (PAGES * PAGE_BYTES) as u64)),
        run(0, 1, shared(u64::MAX, PAGE_BYTES as u64)),
        run(0, 1, shared(0, 7)),
        Piece::Data(pb::PlaneData { kind: 1, count: 1, ..Default::default() }),
        Piece::HandOver(pb::HandOver { computed_tokens: 69, ..hand_over_message(5) }),
        Piece::HandOver(pb::HandOver { counts: vec![4], ..hand_over_message(5) }),
        hand_over_piece(),
    ] {
        // Page 3 is missing.
        let pieces = vec![pages(0, 3), pages(4, 1), wrong.clone()];
        assert_eq!(code(sender.push(pieces).await), Code::FailedPrecondition, "{wrong:?}");
    }
    let too_long = run(0, 1, Place::Inline(vec![1; 2 << 20]));
    assert_eq!(code(sender.push(vec![too_long]).await), Code::OutOfRange);
    let broken = vec![Piece::Data(pb::PlaneData { count: 1, ..Default::default() })];
    assert_eq!(code(sender.push(broken).await), Code::InvalidArgument);
    let empty = vec![Piece::HandOver(pb::HandOver { first: None, ..hand_over_message(5) })];
    assert_eq!(code(sender.push(empty).await), Code::InvalidArgument);
    // The correct pages of the failed pushes were kept, so that only page 3 is missing.
    sender.push(vec![pages(3, 1), hand_over_piece()]).await.unwrap();
    assert_eq!(to.ends().await.0.len(), 11);
}

#[tokio::test]
async fn a_broken_stream_is_continued_by_another() {
    let mut to = Worker::start();
    let reserved = to.reserve(1, 60_000).await;
    let mut sender = Sender::of(&reserved).await;
    assert_eq!(code(sender.push(vec![pages(0, 2)]).await), Code::Cancelled);
    let (pieces, outbound) = mpsc::channel(4);
    let mut other = Sender::of(&reserved).await;
    let manifest = Piece::Manifest(other.manifest.clone());
    for piece in [manifest, pages(2, 1)] {
        pieces.send(pb::PlanePiece { piece: Some(seal(piece)) }).await.unwrap();
    }
    let stream = tokio_stream::wrappers::ReceiverStream::new(outbound);
    let call = tokio::spawn(async move {
        let stream = shown(stream, &other.graph, &other.secret);
        other.client.push(stream).await
    });
    // The receiver has taken the page from the stream, or is about to take it, when the call is aborted.
    let _ = timeout(WAIT, pieces.reserve_many(4)).await.unwrap();
    call.abort();
    sender.push(vec![pages(2, 3), Piece::Renewal(pb::LeaseRenewal {}), hand_over_piece()]).await.unwrap();
    assert_eq!(to.ends().await.0.len(), 11);
}

#[tokio::test]
async fn only_the_accepted_hand_over_is_acknowledged_again() {
    let mut to = Worker::start();
    let mut sender = Sender::of(&to.reserve(1, 60_000).await).await;
    let receipt = sender.push(vec![pages(0, PAGES), hand_over_piece()]).await.unwrap();
    assert_eq!((receipt.computed_tokens, receipt.counts.clone()), (PROMPT as u32, vec![PAGES as u32]));
    let other = || Piece::HandOver(hand_over_message(6));
    assert_eq!(sender.push(vec![hand_over_piece()]).await.unwrap(), receipt);
    assert_eq!(code(sender.push(vec![other()]).await), Code::FailedPrecondition);
    assert_eq!(to.ends().await.0.len(), 11);
    // The sender repeats the hand-over after the request has ended, and sends pages that are no longer needed.
    assert_eq!(sender.push(vec![pages(0, PAGES), hand_over_piece()]).await.unwrap(), receipt);
    assert_eq!(code(sender.push(vec![other()]).await), Code::FailedPrecondition);
    sender.secret[0] ^= 1;
    assert_eq!(sender.says_nothing().await, Code::Unauthenticated);
    to.load(|load| load.kv_pages_used == 0).await;
}

#[tokio::test]
async fn space_is_freed_when_its_sender_is_silent() {
    let mut to = Worker::start();
    let reserved = to.reserve(1, 100).await;
    let mut sender = Sender::of(&reserved).await;
    let (tokens, outcome) = to.ends().await;
    assert!(tokens.is_empty() && matches!(outcome, Outcome::HandoverFailed(_)), "{outcome:?}");
    to.load(|load| load.kv_pages_used == 0).await;
    assert_eq!(code(sender.push(vec![pages(0, PAGES), hand_over_piece()]).await), Code::NotFound);
    // The path may already name another file.
    let opened = OpenOptions::new().read(true).write(true).open(&reserved.shared_memory);
    let mut found = [0; 16];
    let read = opened.and_then(|file| file.read_exact_at(&mut found, 0));
    assert!(read.is_err() || found != secret(), "its shared memory is gone");
}

#[tokio::test]
async fn a_request_without_pages_offers_none_until_some_are_free() {
    let mut to = Worker::start();
    for request in 0..4 {
        to.reserve(request, 60_000).await;
    }
    let receive = pb::PlaneReservation { secret: secret().into(), lease_ms: 60_000 };
    let fifth =
        pb::LaunchGraph { key: Some(key(4, 1).into()), walks: vec![1], receive: Some(receive), ..whole(4) };
    to.launch(fifth).await;
    to.commands.send(Command::Cancel(key(2, 1))).await.unwrap();
    let mut seen = Vec::new();
    while seen.len() < 2 {
        match to.message().await {
            ToConductor::Reserved(reserved) => seen.push(reserved.key.unwrap().request),
            ToConductor::StepReport(report) => {
                seen.extend(report.completions.iter().map(|completion| completion.key.unwrap().request));
            }
            other => panic!("{other:?}"),
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, [2, 4]);
}

/// Flips one bit of a piece after its checksum was made.
fn flipped(piece: Piece) -> Piece {
    match seal(piece) {
        Piece::Data(mut data) => {
            let Some(Place::Inline(bytes)) = &mut data.place else { panic!("not in the message") };
            bytes[77] ^= 16;
            Piece::Data(data)
        }
        Piece::Manifest(manifest) => Piece::Manifest(pb::TransferManifest { ranks: 1, ..manifest }),
        Piece::HandOver(mut hand_over) => {
            hand_over.first.as_mut().unwrap().token_id ^= 1;
            Piece::HandOver(hand_over)
        }
        renewal => renewal,
    }
}

#[tokio::test]
async fn a_changed_bit_fails_the_import_by_run_and_sender() {
    let mut to = Worker::start();
    for (request, broken, named) in [
        (1, 1, "pages 0..3 of 1.0.1 from worker 7 are corrupt"),
        (2, 2, "pages 3..5 of 2.0.1 from worker 7 are corrupt"),
        (3, 3, "the hand-over of 3.0.1 from worker 7 is corrupt"),
    ] {
        let reserved = to.reserve(request, 60_000).await;
        let mut sender = Sender::of(&reserved).await;
        let manifest = Piece::Manifest(sender.manifest.clone());
        let mut pieces = vec![manifest, pages(0, 3), pages(3, 2), hand_over_piece()];
        pieces = pieces.into_iter().map(seal).collect();
        pieces[broken] = flipped(pieces[broken].clone());
        let refused = sender.send_unsealed(pieces).await.unwrap_err();
        assert_eq!(refused.code(), Code::DataLoss, "{refused}");
        assert!(refused.message().contains(named), "{refused}");
        let (tokens, outcome) = to.ends().await;
        let Outcome::HandoverFailed(fault) = outcome else { panic!("{outcome:?}") };
        assert!(tokens.is_empty() && fault.message.contains(named), "{fault:?}");
        // A sender that repeats the hand-over learns the reason, and its planes are not taken.
        let again = sender.push(vec![pages(0, PAGES), hand_over_piece()]).await.unwrap_err();
        assert_eq!((again.code(), again.message()), (Code::NotFound, refused.message()));
    }
    // A corrupt manifest says nothing that can be relied on.
    let reserved = to.reserve(4, 60_000).await;
    let mut sender = Sender::of(&reserved).await;
    let manifest = flipped(Piece::Manifest(sender.manifest.clone()));
    let refused = sender.send_unsealed(vec![manifest, hand_over_piece()]).await.unwrap_err();
    assert_eq!((refused.code(), refused.message()), (Code::DataLoss, "the manifest of 4.0.1 is corrupt"));
    assert!(matches!(to.ends().await.1, Outcome::HandoverFailed(_)));
    let load = to.load(|load| load.transfers.is_some_and(|counts| counts.corrupt == 4)).await;
    assert_eq!((load.kv_pages_used, load.transfers.unwrap().failed), (0, 0));
}

#[tokio::test]
async fn units_that_change_in_shared_memory_fail_the_import() {
    let mut to = Worker::start();
    let reserved = to.reserve(1, 60_000).await;
    let mut sender = Sender::of(&reserved).await;
    let segment = OpenOptions::new().write(true).open(&reserved.shared_memory).unwrap();
    let bytes = vec![1; PAGES * PAGE_BYTES];
    let Piece::Data(data) = seal(run(0, PAGES, Place::Inline(bytes.clone()))) else { unreachable!() };
    // The segment's units begin behind a header of one page of the machine.
    segment.write_all_at(&bytes, 4096).unwrap();
    segment.write_all_at(&[3], 4096 + 200).unwrap();
    let place = Some(Place::Shared(pb::SharedRange { offset: 0, length: bytes.len() as u64 }));
    let shared = Piece::Data(pb::PlaneData { place, ..data });
    let manifest = seal(Piece::Manifest(sender.manifest.clone()));
    let refused = sender.send_unsealed(vec![manifest, shared, seal(hand_over_piece())]).await.unwrap_err();
    assert_eq!(refused.message(), "pages 0..5 of 1.0.1 from worker 7 are corrupt: the checksum is wrong");
    assert!(matches!(to.ends().await.1, Outcome::HandoverFailed(_)));
}
