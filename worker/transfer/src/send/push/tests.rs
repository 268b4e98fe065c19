//! Pushes to receivers that are slow, do not exist, or refuse.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Mutex,
};

use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Streaming, transport::Server};
use tutti_proto::{
    GraphKey,
    cluster::v1::plane_transfer_server::{PlaneTransfer, PlaneTransferServer},
};
use tutti_scheduler::OutputToken;

use super::*;
use crate::{Extent, UnitKind, message_bytes, send::staging::StagingBudget};

/// Time limit that no correct operation reaches.
const WAIT: Duration = Duration::from_secs(120);
const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const SECRET: [u8; 16] = *b"opens the pages!";
/// Number of tokens of the prompt. The prompt takes five pages of 16 tokens.
const PROMPT: usize = 70;
const PAGES: usize = 5;
const PAGE_BYTES: usize = 1 << 20;

fn key(request: u64, graph: u32) -> GraphKey {
    pb::GraphKey { request, incarnation: 0, graph }.into()
}

/// Behaviour of a receiver in one call. A test gives a list of behaviours, of which the last repeats.
#[derive(Clone, Copy)]
enum Act {
    /// Reads nothing.
    Sleeps,
    /// Reads everything and answers with this error.
    Says(tonic::Code),
    /// Reads everything and acknowledges this number of tokens.
    Acknowledges(u32),
}

/// Pieces that the receiver got in each call.
type Heard = Arc<Mutex<Vec<Vec<Piece>>>>;

struct Fake {
    acts: Vec<Act>,
    heard: Heard,
}

#[tonic::async_trait]
impl PlaneTransfer for Fake {
    async fn push(
        &self,
        request: Request<Streaming<pb::PlanePiece>>,
    ) -> Result<Response<pb::TransferReceipt>, Status> {
        let call = {
            let mut heard = self.heard.lock().unwrap();
            heard.push(vec![]);
            heard.len() - 1
        };
        let act = self.acts[call.min(self.acts.len() - 1)];
        let mut pieces = request.into_inner();
        if let Act::Sleeps = act {
            std::future::pending::<()>().await;
        }
        while let Some(piece) = pieces.message().await? {
            self.heard.lock().unwrap()[call].push(piece.piece.unwrap());
        }
        match act {
            Act::Acknowledges(computed_tokens) => {
                let key = Some(key(1, 1).into());
                Ok(Response::new(pb::TransferReceipt { key, computed_tokens, counts: vec![PAGES as u32] }))
            }
            Act::Says(code) => Err(Status::new(code, "as the test wants")),
            Act::Sleeps => unreachable!("it sleeps for ever"),
        }
    }
}

struct Bench {
    heard: Heard,
    queue: Arc<Queue>,
    counts: Arc<TransferCounts>,
    push: Push,
}

/// Creates a push to a receiver that behaves as `acts` says. If `acts` is empty, nothing listens on the port.
async fn bench(acts: &[Act], lease_ms: u32) -> Bench {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let heard = Heard::default();
    if !acts.is_empty() {
        let fake = Fake { acts: acts.to_vec(), heard: Arc::clone(&heard) };
        let service = PlaneTransferServer::new(fake).max_decoding_message_size(message_bytes(PAGE_BYTES));
        let server = Server::builder().add_service(service);
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    }
    let queue = Arc::new(Queue::new(Arc::new(StagingBudget::new(PAGE_BYTES))));
    let counts = Arc::<TransferCounts>::default();
    let push = Push {
        destination: pb::PlaneDestination {
            key: Some(key(1, 1).into()),
            address,
            secret: SECRET.into(),
            lease_ms,
            layout_hash: 8,
            shared_memory: String::new(),
            known_pages: 0,
            ranks: vec![],
            sender: 3,
        },
        layout: UnitLayout {
            kind: UnitKind::Pages,
            id: 7,
            unit_bytes: PAGE_BYTES,
            slot_bytes: 0,
            planes: [].into(),
            share: GroupRank::ALONE,
        },
        count: PAGES,
        queue: Arc::clone(&queue),
        connections: Arc::new(Connections::new(LOCALHOST.into())),
        counts: Arc::clone(&counts),
    };
    Bench { heard, queue, counts, push }
}

impl Bench {
    fn stage(&self) {
        for first in 0..PAGES {
            let (key, kind) = (key(1, 0), UnitKind::Pages);
            let run = Run { key, kind, extent: Extent::Whole, first, count: 1 };
            self.queue.put_run(run, vec![first as u8; PAGE_BYTES]);
        }
    }

    fn queue_end(&self) {
        let first = Some(OutputToken { token: 9, index: 0 });
        let hand_over = HandOver { first, computed: PROMPT, pages: PAGES, slots: 0 };
        self.queue.put_end(hand_over, std::time::Instant::now());
    }

    async fn run(self) -> Option<Result<(), TransferError>> {
        timeout(WAIT, self.push.run()).await.expect("it does not end")
    }
}

fn is_lost(outcome: Option<Result<(), TransferError>>, why: &str) {
    match outcome {
        Some(Err(TransferError::Lost(message))) => assert!(message.contains(why), "{message}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn all_pages_come_in_order_between_manifest_and_hand_over() {
    let bench = bench(&[Act::Acknowledges(PROMPT as u32)], 60_000).await;
    bench.stage();
    bench.queue_end();
    let (heard, counts) = (Arc::clone(&bench.heard), Arc::clone(&bench.counts));
    assert_eq!(bench.run().await, Some(Ok(())));
    let heard = heard.lock().unwrap();
    let [Piece::Manifest(manifest), pages @ .., Piece::HandOver(hand_over)] = &heard[0][..] else {
        panic!("{} pieces", heard[0].len())
    };
    assert_eq!((manifest.layout_hash, &manifest.counts), (7, &vec![PAGES as u32]));
    assert_eq!(hand_over.computed_tokens, PROMPT as u32);
    let firsts = pages.iter().map(|piece| match piece {
        Piece::Data(data) => {
            assert_eq!(seal(piece.clone()), *piece, "its checksum is not that of its bytes");
            (data.first, data.count)
        }
        other => panic!("{other:?}"),
    });
    assert_eq!(firsts.collect::<Vec<_>>(), [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)]);
    let counts = counts.message();
    assert_eq!((counts.tcp_bytes, counts.handed_over), ((PAGES * PAGE_BYTES) as u64, 1));
}

#[tokio::test]
async fn a_receiver_that_takes_nothing_is_given_up() {
    let bench = bench(&[Act::Sleeps], 200).await;
    // These are more bytes than the window of the stream.
    (0..8).for_each(|_| bench.stage());
    let (counts, queue) = (Arc::clone(&bench.counts), Arc::clone(&bench.queue));
    is_lost(bench.run().await, "has taken nothing for 200ms");
    assert_eq!(counts.message().failed, 1);
    queue.close();
}

#[tokio::test]
async fn a_receiver_that_does_not_answer_is_given_up() {
    let bench = bench(&[Act::Sleeps], 100).await;
    bench.queue_end();
    is_lost(bench.run().await, "has not answered within 100ms");
}

#[tokio::test]
async fn an_unreachable_receiver_is_a_lost_transfer() {
    let bench = bench(&[], 60_000).await;
    bench.stage();
    bench.queue_end();
    is_lost(bench.run().await, "");
}

#[tokio::test]
async fn a_refusal_by_the_receiver_is_final() {
    let bench = bench(&[Act::Says(tonic::Code::FailedPrecondition)], 60_000).await;
    bench.queue_end();
    let heard = Arc::clone(&bench.heard);
    let outcome = bench.run().await;
    assert!(matches!(&outcome, Some(Err(TransferError::Refused(why))) if why.contains("as the test wants")));
    assert_eq!(heard.lock().unwrap().len(), 1, "and not asked again");
}

#[tokio::test]
async fn a_hand_over_whose_answer_is_lost_is_repeated() {
    let bench = bench(&[Act::Says(tonic::Code::Unavailable), Act::Acknowledges(PROMPT as u32)], 60_000).await;
    bench.stage();
    bench.queue_end();
    let heard = Arc::clone(&bench.heard);
    assert_eq!(bench.run().await, Some(Ok(())));
    assert!(matches!(&heard.lock().unwrap()[1][..], [Piece::Manifest(_), Piece::HandOver(_)]));
}

#[tokio::test]
async fn pages_lost_with_the_answer_are_not_the_requests_fault() {
    let acts = [Act::Says(tonic::Code::Unavailable), Act::Says(tonic::Code::FailedPrecondition)];
    let bench = bench(&acts, 60_000).await;
    bench.queue_end();
    is_lost(bench.run().await, "pages were lost on the way");
}

#[tokio::test]
async fn a_wrong_receipt_is_refused() {
    let bench = bench(&[Act::Acknowledges(3)], 60_000).await;
    bench.queue_end();
    assert!(matches!(bench.run().await, Some(Err(TransferError::Refused(_)))));
}

#[tokio::test]
async fn a_push_stops_when_its_request_has_ended() {
    let bench = bench(&[Act::Acknowledges(3)], 60_000).await;
    bench.stage();
    bench.queue.close();
    let counts = Arc::clone(&bench.counts);
    assert_eq!(bench.run().await, None);
    assert_eq!(counts.message().failed, 0);
}

#[tokio::test]
async fn a_sender_with_nothing_to_send_renews_its_lease() {
    let bench = bench(&[Act::Acknowledges(PROMPT as u32)], 300).await;
    let (heard, queue) = (Arc::clone(&bench.heard), Arc::clone(&bench.queue));
    let run = tokio::spawn(bench.run());
    let renewals = || {
        let heard = heard.lock().unwrap();
        heard.iter().flatten().filter(|piece| matches!(piece, Piece::Renewal(_))).count()
    };
    timeout(WAIT, async {
        while renewals() < 4 {
            tokio::task::yield_now().await
        }
    })
    .await
    .unwrap();
    queue.close();
    assert_eq!(run.await.unwrap(), None);
}
