//! Tests of embeddings that go from the encoding worker to the prefilling worker.

use super::*;

const CONFIG: &str = r#"{"vocab_size": 1000, "max_position_embeddings": 512, "audio_token_id": 999,
    "audio_bytes_per_token": 8}"#;
/// Number of tokens of a media item. `BYTES` is its number of bytes.
const TOKENS: u32 = 20;
const BYTES: usize = 8 * 20 - 5;
const ROW_BYTES: usize = 4 * 4;

fn worker(node: Option<&str>) -> Worker {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), CONFIG).unwrap();
    let nodes = node.map(|node| vec![node.to_owned()]);
    Worker::of(dir.path(), 16, nodes.as_deref())
}

/// Returns a request whose prompt has two audio items, the second directly after the first.
fn with_media(request: u64) -> pb::LaunchGraph {
    let item = |index: u8, first| pb::MediaItem {
        kind: pb::MediaKind::Audio.into(),
        format: "wav".into(),
        data: (0..BYTES).map(|byte| byte as u8 ^ index ^ request as u8).collect(),
        // Items with other data have other digests, by which a worker keeps their embeddings.
        digest: vec![index ^ request as u8; 16],
        runs: vec![pb::MediaRun { first, tokens: TOKENS }],
        ..Default::default()
    };
    let mut graph = whole(request);
    let spec = graph.spec.as_mut().unwrap();
    spec.prompt[10..10 + 2 * TOKENS as usize].fill(999);
    spec.media = vec![item(1, 10), item(2, 10 + TOKENS)];
    graph
}

fn encode(request: u64, reserved: &pb::Reserved) -> pb::LaunchGraph {
    let send_to = prefill(request, reserved).send_to;
    pb::LaunchGraph { key: Some(key(request, 2).into()), walks: vec![3], send_to, ..with_media(request) }
}

impl Worker {
    async fn reserve_embeddings(&mut self, request: u64, lease_ms: u32) -> pb::Reserved {
        let receive_media = Some(pb::PlaneReservation { secret: secret().into(), lease_ms });
        self.launch(pb::LaunchGraph { receive_media, ..with_media(request) }).await;
        loop {
            if let ToConductor::Reserved(reserved) = self.message().await {
                assert_eq!(reserved.key, Some(key(request, 0).into()));
                return reserved;
            }
        }
    }
}

/// Returns the output tokens of a request that is encoded and prefilled on the same worker.
async fn by_itself(request: u64) -> Vec<u32> {
    let mut worker = worker(None);
    let reserved = worker.reserve_embeddings(request, 60_000).await;
    worker.launch(encode(request, &reserved)).await;
    let (mut tokens, mut ended) = (Vec::new(), 0);
    while ended < 2 {
        let ToConductor::StepReport(report) = worker.message().await else { panic!("not a report") };
        tokens.extend(report.rows.into_iter().flat_map(|row| row.tokens).map(|token| token.token_id));
        for completion in report.completions {
            let outcome = completion.outcome.unwrap();
            assert!(matches!(outcome, Outcome::HandedOver(_) | Outcome::Finished(_)), "{outcome:?}");
            ended += 1;
        }
    }
    worker.load(|load| load.kv_pages_used == 0 && load.running + load.waiting == 0).await;
    tokens
}

#[tokio::test]
async fn tokens_are_the_same_for_any_encoding_worker_and_transport() {
    let (mut from, mut to) = (worker(Some("audio_encoder")), worker(Some("thinker")));
    for (request, shared) in [(1, true), (2, false), (3, true)] {
        let mut reserved = to.reserve_embeddings(request, 60_000).await;
        if !shared {
            // No such path exists on this host, so the sender behaves as on another host.
            reserved.shared_memory = "/proc/1/fd/none".into();
        }
        from.launch(encode(request, &reserved)).await;
        let (none, outcome) = from.ends().await;
        assert_eq!((none, outcome), (vec![], Outcome::HandedOver(pb::HandedOver { generated: 0 })));
        let (tokens, outcome) = to.ends().await;
        assert!(matches!(outcome, Outcome::Finished(pb::Finished { generated: 12, .. })), "{outcome:?}");
        assert_eq!(tokens, by_itself(request).await, "request {request}");
    }
    assert_ne!(by_itself(1).await, by_itself(2).await);
    let counts = from.load(|load| load.running == 0).await.transfers.unwrap();
    let bytes = (2 * TOKENS as usize * ROW_BYTES) as u64;
    assert_eq!((counts.shared_memory_bytes, counts.tcp_bytes, counts.handed_over), (2 * bytes, bytes, 3));
}

#[tokio::test]
async fn space_is_freed_when_its_encoder_is_silent() {
    let mut to = worker(Some("thinker"));
    to.reserve_embeddings(1, 50).await;
    let (_, outcome) = to.ends().await;
    assert!(matches!(outcome, Outcome::HandoverFailed(_)), "{outcome:?}");
    to.load(|load| load.running + load.waiting == 0).await;
    // The request that has ended does not block the next one.
    let reserved = to.reserve_embeddings(2, 60_000).await;
    let mut from = worker(Some("audio_encoder"));
    from.launch(encode(2, &reserved)).await;
    assert!(matches!(from.ends().await.1, Outcome::HandedOver(_)));
    assert!(matches!(to.ends().await.1, Outcome::Finished(_)));
}

#[tokio::test]
async fn cancelling_either_side_ends_both() {
    let (mut from, mut to) = (worker(Some("audio_encoder")), worker(Some("thinker")));
    let reserved = to.reserve_embeddings(1, 60_000).await;
    to.commands.send(Command::Cancel(key(1, 0))).await.unwrap();
    assert!(matches!(to.ends().await.1, Outcome::Cancelled(_)));
    from.launch(encode(1, &reserved)).await;
    assert!(matches!(from.ends().await.1, Outcome::HandoverFailed(_)));
    let reserved = to.reserve_embeddings(2, 60_000).await;
    from.commands.send(Command::Cancel(key(2, 2))).await.unwrap();
    from.launch(encode(2, &reserved)).await;
    assert!(matches!(from.ends().await.1, Outcome::Cancelled(_)));
    to.commands.send(Command::Cancel(key(2, 0))).await.unwrap();
    assert!(matches!(to.ends().await.1, Outcome::Cancelled(_)));
    for worker in [&mut from, &mut to] {
        worker.load(|load| load.running + load.waiting + load.kv_pages_used == 0).await;
    }
}

#[tokio::test]
async fn embeddings_that_the_receiver_does_not_expect_are_an_error() {
    let (mut from, mut to) = (worker(Some("audio_encoder")), worker(Some("thinker")));
    let reserved = to.reserve_embeddings(1, 60_000).await;
    let mut graph = encode(1, &reserved);
    graph.spec.as_mut().unwrap().media.pop();
    from.launch(graph).await;
    let (_, Outcome::Failed(fault)) = from.ends().await else { panic!("it was taken") };
    assert!(fault.message.contains("[20] embeddings are announced, but 40 are reserved"), "{fault:?}");
    let mut graph = encode(2, &reserved);
    graph.spec.as_mut().unwrap().media[0].runs[0].tokens = 21;
    from.launch(graph).await;
    let (_, Outcome::Refused(fault)) = from.ends().await else { panic!("it was run") };
    assert_eq!(fault.field, "media[0].runs");
}
