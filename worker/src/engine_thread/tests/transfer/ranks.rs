//! Tests of transfers between TP groups whose ranks exchange their shares over real sockets. The ranks of a group are
//! threads of the test, which meet in shared memory as processes do.

use std::{
    sync::{Mutex, atomic::AtomicUsize, atomic::Ordering},
    thread,
};

use tokio::net::TcpListener;
use tokio_stream::iter;
use tonic::{Code, Status};
use tutti_kernels::{
    collective::{GroupRank, SharedMemory},
    cpu::{CpuDevice, Isa},
};
use tutti_models::{
    LoadFormat, LoadOptions, Quantize, load,
    lockstep::{Leader, follow},
};
use tutti_proto::cluster::v1::{
    plane_data::Place, plane_piece::Piece, plane_transfer_client::PlaneTransferClient, rank_order::Order,
    rank_reports_client::RankReportsClient,
};
use tutti_runtime::token::Token;
use tutti_transfer::{Connector, Endpoint, Hosts, Run, StreamConnector, checksum::seal};

use super::*;

fn hosts() -> Hosts {
    Hosts { own: LOCALHOST.into(), leader: LOCALHOST }
}

/// The follower of a group. The test inspects the follower, and can make it lose a share.
#[derive(Default)]
struct Follower {
    /// Number of shares that the follower was told to send.
    sends: AtomicUsize,
    /// Index of the share that the follower loses.
    loses: Mutex<Option<usize>>,
    load: watch::Sender<pb::WorkerLoad>,
}

struct Disturbed {
    connector: StreamConnector,
    follower: Arc<Follower>,
}

impl Connector for Disturbed {
    fn order(&mut self, order: pb::RankOrder) -> Result<(), String> {
        self.connector.order(order)
    }

    fn send(&mut self, run: Run, data: Vec<u8>) {
        let send = self.follower.sends.fetch_add(1, Ordering::SeqCst);
        if *self.follower.loses.lock().unwrap() != Some(send) {
            self.connector.send(run, data);
        }
    }

    fn take(&mut self, run: &Run) -> Option<Vec<u8>> {
        self.connector.take(run)
    }
}

/// A group of two ranks.
struct Group {
    worker: Worker,
    follower: Arc<Follower>,
    /// Bytes per page with all heads.
    page_bytes: usize,
}

impl Group {
    fn new(model: impl Fn(GroupRank, Box<SharedMemory>) -> Box<dyn Model> + Send + Clone + 'static) -> Self {
        let meeting = Arc::new(tempfile::tempdir().unwrap());
        let follower = Arc::<Follower>::default();
        let runtime = Handle::current();
        let rank_of = move |rank| {
            let group_rank = GroupRank { rank, world_size: 2 };
            let meet = |what: &str| {
                Box::new(SharedMemory::meet(&meeting.path().join(what), group_rank, WAIT, WAIT).unwrap())
            };
            let model = model(group_rank, meet("data"));
            (model, meet("plans"), group_rank)
        };
        let (other, disturbed) = (rank_of.clone(), Arc::clone(&follower));
        thread::spawn(move || {
            let (mut model, mut plans, group_rank) = other(1);
            let (layout, load) = (model.page_layout(), disturbed.load.clone());
            let connector = Endpoint::follower(group_rank, hosts(), &layout, load, &runtime);
            follow(&mut *model, &mut *plans, &mut Disturbed { connector, follower: disturbed }, |_| {})
                .unwrap();
        });
        let (model, plans, _) = rank_of(0);
        let leader = Box::new(Leader::new(model, plans));
        let page_bytes = leader.page_layout().page_bytes();
        Self { page_bytes, worker: Worker::serving(leader, Some(ByteSize(16 << 20))), follower }
    }

    /// A group whose ranks simulate a model with pages and a slot. Each rank holds all of the pages and the whole slot.
    fn simulated() -> Self {
        Self::new(|group_rank, _| simulated(group_rank.rank as u32))
    }

    /// A group that computes the shipped model. Each rank holds half of the heads.
    fn real() -> Self {
        Self::new(|_, data| {
            let options = LoadOptions {
                kv_cache_dtype: tutti_models::KvCacheDtype::Auto,
                dir: Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tutti-tiny/checkpoint"),
                load_format: LoadFormat::Auto,
                quantize: Quantize::None,
                max_step_tokens: 64,
                page_tokens: 16,
                expert_parallel: false,
                nodes: None,
                seed: 0,
            };
            let device = CpuDevice::new(1, Isa::Portable).unwrap().with_group(data);
            load(&options, device, &mut |_| {}).unwrap()
        })
    }

    /// Returns the bytes that the leader and the follower have sent, by both transports together.
    async fn sent(&mut self) -> [u64; 2] {
        let leader = self.worker.load(|load| load.kv_pages_used == 0).await.transfers;
        let follower = self.follower.load.borrow().transfers;
        [leader, follower]
            .map(|counts| counts.map_or(0, |counts| counts.shared_memory_bytes + counts.tcp_bytes))
    }
}

fn simulated(rank: u32) -> Box<dyn Model> {
    let settings = SimSettings { profile: SimProfile::Instant, state: true, ..Default::default() };
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tutti-tiny/checkpoint");
    let options = SimOptions {
        dir: &dir,
        max_step_tokens: 64,
        page_tokens: 16,
        nodes: None,
        rank,
        settings: &settings,
    };
    load_sim(&options).unwrap()
}

/// Runs a request through two workers. Returns its tokens and the outcomes.
async fn divided(request: u64, from: &mut Worker, to: &mut Worker, over: Over) -> (Vec<u32>, [Outcome; 2]) {
    let mut reserved = to.reserve(request, 60_000).await;
    if over == Over::Tcp {
        // No such paths exist on this host, so the senders behave as on other hosts.
        reserved.shared_memory = "/proc/1/fd/none".into();
        reserved.ranks.iter_mut().for_each(|room| room.shared_memory = "/proc/1/fd/none".into());
    }
    from.launch(prefill(request, &reserved)).await;
    let (first, sent) = from.ends().await;
    let (rest, received) = to.ends().await;
    ([first, rest].concat(), [sent, received])
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Over {
    SharedMemory,
    Tcp,
}

fn is_finished(outcomes: &[Outcome; 2]) -> bool {
    matches!(outcomes, [Outcome::HandedOver(_), Outcome::Finished(pb::Finished { generated: 12, .. })])
}

/// Returns the error message of a hand-over that has failed.
fn failure(outcome: &Outcome) -> &str {
    let Outcome::HandoverFailed(fault) = outcome else { panic!("{outcome:?}") };
    &fault.message
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_rank_sends_its_own_share_and_the_tokens_are_those_of_one_group() {
    let (mut from, mut to, mut whole) = (Group::real(), Group::real(), Group::real());
    let (mut shares, share) = (0, from.page_bytes / 2);
    // Requests 1 and 1001 have the same prompt. When request 1001 arrives, the decoding ranks already have all pages of
    // the prompt except the last page.
    for (count, (request, over, pages)) in
        (1..).zip([(1, Over::SharedMemory, PAGES), (2, Over::Tcp, PAGES), (1001, Over::SharedMemory, 1)])
    {
        let (tokens, outcomes) = divided(request, &mut from.worker, &mut to.worker, over).await;
        assert!(is_finished(&outcomes), "{outcomes:?}");
        whole.worker.launch(self::whole(request)).await;
        assert_eq!(tokens, whole.worker.ends().await.0, "request {request}");
        shares += pages * share;
        let mut load = from.follower.load.subscribe();
        let handed = |load: &pb::WorkerLoad| load.transfers.is_some_and(|counts| counts.handed_over == count);
        timeout(WAIT, load.wait_for(handed)).await.expect("the follower has not sent its share").unwrap();
        // Each of the two ranks carries half of the bytes.
        assert_eq!(from.sent().await, [shares as u64; 2], "request {request}");
    }
    assert_eq!(to.sent().await, [0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn groups_of_unlike_sizes_exchange_whole_pages_through_their_leaders() {
    let mut one = Worker::serving(simulated(0), None);
    let mut two = Group::simulated();
    let mut alone = Worker::serving(simulated(0), None);
    for request in 1..3 {
        let (tokens, outcomes) = match request {
            1 => divided(request, &mut one, &mut two.worker, Over::SharedMemory).await,
            _ => divided(request, &mut two.worker, &mut one, Over::SharedMemory).await,
        };
        assert!(is_finished(&outcomes), "{outcomes:?}");
        alone.launch(whole(request)).await;
        assert_eq!(tokens, alone.ends().await.0, "request {request}");
    }
    // Five pages of 16 digests of 8 bytes each, and the slot with one digest.
    assert_eq!(two.sent().await, [(PAGES * 16 * 8 + 8) as u64, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_share_fails_its_request_alone_and_names_the_rank() {
    let (mut from, mut to) = (Group::simulated(), Group::simulated());
    let (_, outcomes) = divided(1, &mut from.worker, &mut to.worker, Over::SharedMemory).await;
    assert!(is_finished(&outcomes), "{outcomes:?}");
    let shares = from.follower.sends.swap(0, Ordering::SeqCst);
    assert!(shares >= 3, "pages of several chunks, and the slot");
    for lost in 0..shares {
        let request = 2 + lost as u64;
        *from.follower.loses.lock().unwrap() = Some(lost);
        from.follower.sends.store(0, Ordering::SeqCst);
        let over = if lost % 2 == 0 { Over::SharedMemory } else { Over::Tcp };
        let reserved = to.worker.reserve(request, 60_000).await;
        let other = if over == Over::Tcp { "/proc/1/fd/none" } else { &reserved.ranks[0].shared_memory };
        let mut graph = prefill(request, &reserved);
        graph.send_to.as_mut().unwrap().ranks[0].shared_memory = other.to_owned();
        from.worker.launch(graph).await;
        for worker in [&mut from.worker, &mut to.worker] {
            let (_, outcome) = worker.ends().await;
            let why = failure(&outcome);
            assert!(why.contains("rank 1") && why.contains("missing"), "{why}");
            worker.load(|load| load.kv_pages_used == 0).await;
        }
    }
    *from.follower.loses.lock().unwrap() = None;
    let (_, outcomes) = divided(100, &mut from.worker, &mut to.worker, Over::Tcp).await;
    assert!(is_finished(&outcomes), "{outcomes:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_cannot_be_reached_fails_the_request_alone() {
    let (mut from, mut to) = (Group::simulated(), Group::simulated());
    let reserved = to.worker.reserve(1, 2_000).await;
    let mut graph = prefill(1, &reserved);
    // Nothing listens at this port once the listener is dropped.
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    graph.send_to.as_mut().unwrap().ranks[0].address = gone.to_string();
    from.worker.launch(graph).await;
    let (_, outcome) = from.worker.ends().await;
    assert!(failure(&outcome).contains("rank 1"), "{outcome:?}");
    // The receiving ranks get nothing more, and free their pages when the lease ends.
    let (_, outcome) = to.worker.ends().await;
    assert!(failure(&outcome).contains("silent"), "{outcome:?}");
    let (_, outcomes) = divided(2, &mut from.worker, &mut to.worker, Over::SharedMemory).await;
    assert!(is_finished(&outcomes), "{outcomes:?}");
    for group in [&mut from, &mut to] {
        group.worker.load(|load| load.kv_pages_used == 0).await;
    }
}

/// Pushes pieces to a rank of a group, with the credential of a request.
async fn push(
    port: u32,
    (key, secret): (Option<pb::GraphKey>, [u8; 16]),
    manifest: pb::TransferManifest,
    pieces: Vec<Piece>,
) -> Result<pb::TransferReceipt, Status> {
    let mut client = PlaneTransferClient::connect(format!("http://127.0.0.1:{port}")).await.unwrap();
    let pieces = [vec![Piece::Manifest(manifest)], pieces].concat();
    let pieces = pieces.into_iter().map(|piece| pb::PlanePiece { piece: Some(seal(piece)) });
    let mut request = tonic::Request::new(iter(pieces.collect::<Vec<_>>()));
    Token::of_bytes(&secret).add_to(request.metadata_mut().as_mut());
    let graph = GraphKey::from(key.unwrap()).to_string();
    request.metadata_mut().insert("tutti-graph", graph.parse().unwrap());
    let call = client.push(request);
    timeout(WAIT, call).await.expect("no answer").map(tonic::Response::into_inner)
}

fn manifest(reserved: &pb::Reserved) -> pb::TransferManifest {
    let plane = |name: &str, unit_bytes| pb::TransferPlane { name: name.into(), unit_bytes };
    pb::TransferManifest {
        layout_hash: reserved.layout_hash,
        counts: vec![PAGES as u32, 1],
        planes: vec![plane("kv", 16 * 8), plane("state", 8)],
        ranks: 2,
        rank: 1,
        sender: 7,
        ..Default::default()
    }
}

fn page(index: u32) -> Piece {
    let place = Some(Place::Inline(vec![7; 16 * 8]));
    Piece::Data(pb::PlaneData { first: index, count: 1, place, ..Default::default() })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_takes_only_its_own_share_and_only_by_the_secret() {
    let (mut from, mut to) = (Group::simulated(), Group::simulated());
    let reserved = to.worker.reserve(1, 60_000).await;
    let [room] = &reserved.ranks[..] else { panic!("{reserved:?}") };
    let refused = async |port, change: fn(&mut pb::TransferManifest)| {
        let mut manifest = manifest(&reserved);
        change(&mut manifest);
        push(port, (reserved.key, secret()), manifest, vec![page(0)]).await.unwrap_err().code()
    };
    let guessed = push(room.port, (reserved.key, [0; 16]), manifest(&reserved), vec![page(0)]).await;
    assert_eq!(guessed.unwrap_err().code(), Code::Unauthenticated);
    assert_eq!(refused(room.port, |manifest| manifest.rank = 0).await, Code::FailedPrecondition);
    assert_eq!(refused(room.port, |manifest| manifest.ranks = 4).await, Code::FailedPrecondition);
    assert_eq!(refused(room.port, |manifest| manifest.ranks = 0).await, Code::FailedPrecondition);
    assert_eq!(
        refused(reserved.port, |_| {}).await,
        Code::FailedPrecondition,
        "the leader has another share"
    );
    assert_eq!(refused(room.port, |manifest| manifest.layout_hash ^= 1).await, Code::FailedPrecondition);
    // A report with a wrong secret is refused.
    let mut client = RankReportsClient::connect(format!("http://127.0.0.1:{}", reserved.port)).await.unwrap();
    let hello = pb::RankReport { report: Some(pb::rank_report::Report::Hello(pb::RankHello { rank: 1 })) };
    assert_eq!(client.report(iter([hello])).await.unwrap_err().code(), Code::Unauthenticated);
    // The metadata alone decides, so the call of a stranger ends even if the stranger sends nothing.
    let silent = client.report(tokio_stream::pending::<pb::RankReport>());
    let silent = timeout(WAIT, silent).await.expect("the call is held");
    assert_eq!(silent.unwrap_err().code(), Code::Unauthenticated);

    // The refused calls have not changed the request. A page that is sent twice is written twice.
    assert_eq!(
        push(room.port, (reserved.key, secret()), manifest(&reserved), vec![page(0), page(0)])
            .await
            .unwrap_err()
            .code(),
        Code::Cancelled
    );
    from.worker.launch(prefill(1, &reserved)).await;
    assert!(matches!(from.worker.ends().await.1, Outcome::HandedOver(_)));
    assert!(matches!(to.worker.ends().await.1, Outcome::Finished(_)));
    to.worker.load(|load| load.kv_pages_used == 0).await;

    // A share that arrives after a cancel finds no reservation. The cancel reaches the ranks as an order. The ranks'
    // answer to the next order shows that they have received the cancel.
    let reserved = to.worker.reserve(2, 60_000).await;
    to.worker.commands.send(Command::Cancel(key(2, 1))).await.unwrap();
    assert!(matches!(to.worker.ends().await.1, Outcome::Cancelled(_)));
    let next = to.worker.reserve(3, 60_000).await;
    let late =
        push(reserved.ranks[0].port, (reserved.key, secret()), manifest(&reserved), vec![page(0)]).await;
    assert_eq!(late.unwrap_err().code(), Code::NotFound);
    from.worker.launch(prefill(3, &next)).await;
    assert!(matches!(to.worker.ends().await.1, Outcome::Finished(_)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_on_either_side_ends_the_shares_of_all_ranks() {
    let (mut from, mut to) = (Group::simulated(), Group::simulated());
    let reserved = to.worker.reserve(1, 60_000).await;
    to.worker.commands.send(Command::Cancel(key(1, 1))).await.unwrap();
    assert!(matches!(to.worker.ends().await.1, Outcome::Cancelled(_)));
    from.worker.launch(prefill(1, &reserved)).await;
    assert!(matches!(from.worker.ends().await.1, Outcome::HandoverFailed(_)));
    let reserved = to.worker.reserve(2, 60_000).await;
    from.worker.commands.send(Command::Cancel(key(2, 0))).await.unwrap();
    from.worker.launch(prefill(2, &reserved)).await;
    assert!(matches!(from.worker.ends().await.1, Outcome::Cancelled(_)));
    to.worker.commands.send(Command::Cancel(key(2, 1))).await.unwrap();
    assert!(matches!(to.worker.ends().await.1, Outcome::Cancelled(_)));
    for worker in [&mut from.worker, &mut to.worker] {
        worker.load(|load| load.kv_pages_used == 0).await;
    }
    let (_, outcomes) = divided(3, &mut from.worker, &mut to.worker, Over::SharedMemory).await;
    assert!(is_finished(&outcomes), "{outcomes:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_cannot_report_takes_no_more_orders() {
    let group_rank = GroupRank { rank: 1, world_size: 2 };
    let (layout, load) = (simulated(1).page_layout(), watch::Sender::default());
    let mut connector = Endpoint::follower(group_rank, hosts(), &layout, load, &Handle::current());
    // Nothing listens at this port once the listener is dropped.
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let order = |order| pb::RankOrder { order: Some(order) };
    let to = pb::ReportTo { port: gone.into(), secret: secret().into(), socket: String::new() };
    connector.order(order(Order::ReportTo(to))).unwrap();
    let why = timeout(WAIT, async {
        loop {
            if let Err(why) = connector.order(order(Order::Forget(key(1, 1).into()))) {
                return why;
            }
            tokio::task::yield_now().await;
        }
    });
    let why = why.await.expect("it takes orders");
    assert!(why.contains("cannot report to its leader"), "{why}");
}
