//! Workers that join: admission, the model, readiness, and the effects of their end.

use futures_util::FutureExt;
use tutti_proto::cluster::v1::{self as pb, worker_message::Message as ToConductor};
use tutti_runtime::{Error, ErrorKind, health::State};

use tokio::sync::mpsc;
use tonic::Code;
use tutti_conductor::worker_service::ByHand;
use tutti_settings::ConnectionSettings;

use crate::bench::{Bench, hello, limits, metric, read, ready, soon, spec, token};

#[tokio::test]
async fn it_is_ready_only_when_all_spawned_workers_are() {
    let bench = Bench::new(limits(2)).await;
    assert_eq!(bench.cluster.describe().unwrap_err().kind(), ErrorKind::Unavailable);
    let _first = bench.ready(0).await;
    assert_eq!(bench.health.ready(), State::Not("1 of 2 workers have loaded the model".into()));
    let second = bench.ready(1).await;
    bench.wait_ready(|state| *state == State::Ok).await;
    let described = bench.cluster.describe().unwrap();
    let model = described.model.unwrap();
    assert_eq!((described.ready, model.served_name.as_str(), model.has_tokenizer), (true, "tiny", true));
    // After the start, one worker is enough for readiness.
    drop(second);
    soon("the second is gone", async {
        while bench.metric("tutti_workers_ready") != 1 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(bench.health.ready(), State::Ok);
}

#[tokio::test]
async fn the_last_workers_end_is_the_end_of_readiness() {
    let bench = Bench::new(limits(1)).await;
    let worker = bench.ready(0).await;
    drop(worker);
    bench.wait_ready(|state| matches!(state, State::Not(why) if why.contains("worker 0"))).await;
    assert_eq!(bench.submit(1).unwrap_err().kind(), ErrorKind::Unavailable);
    let _again = bench.ready(0).await;
    bench.wait_ready(|state| *state == State::Ok).await;
}

#[tokio::test]
async fn a_spawned_workers_rank_needs_its_token() {
    let bench = Bench::new(limits(1)).await;
    let error = bench.try_join_with(hello(0), "").await.err().unwrap();
    assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidArgument, Some("rank")));
    let error = bench.try_join_with(hello(0), "guess").await.err().unwrap();
    assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidArgument, Some("join_token_file")));
    let error = bench.try_join(hello(1)).await.err().unwrap();
    assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidArgument, Some("rank")));
}

#[tokio::test]
async fn another_build_is_turned_away() {
    let bench = Bench::new(limits(1)).await;
    let error = bench.try_join(pb::Hello { version: "0.0.0".into(), ..hello(0) }).await.err().unwrap();
    assert!(error.message().contains("0.0.0"), "{error}");
}

#[tokio::test]
async fn a_rank_is_held_by_one_worker_at_a_time() {
    let bench = Bench::new(limits(1)).await;
    let _first = bench.join(0).await;
    let error = bench.try_join(hello(0)).await.err().unwrap();
    assert_eq!((error.kind(), error.field()), (ErrorKind::Unavailable, Some("rank")));
    assert!(error.message().contains("1000"), "{error}");
}

#[tokio::test]
async fn a_spawned_process_that_the_conductor_has_let_go_does_not_join_again() {
    let bench = Bench::outlived(limits(1), 0).await;
    drop(bench.ready(0).await);
    bench.wait_ready(|state| matches!(state, State::Not(why) if why.contains("worker 0"))).await;
    let error = bench.try_join(hello(0)).await.err().unwrap();
    assert!(error.message().contains("the conductor has let go of the process 1000"), "{error}");
    // Its successor at the rank does.
    assert!(bench.try_join(pb::Hello { pid: 7, ..hello(0) }).await.is_ok());
}

#[tokio::test]
async fn requests_go_where_their_prompts_are_held_from_the_conductor_before() {
    let bench = Bench::outlived(limits(2), 1).await;
    let (_first, mut second) = (bench.ready(0).await, bench.ready(1).await);
    bench.wait_ready(|state| *state == State::Ok).await;
    let tokens: Vec<u32> = (0..48).map(|token| token % 7).collect();
    let prompts = vec![pb::HeldPrompt { tokens: tokens.clone(), cache_salt: Vec::new() }];
    second.say(ToConductor::HeldPrompts(pb::HeldPrompts { prompts })).await;
    // Messages are read in order, so the prompts have been read once this one's effect is seen.
    let load = Some(pb::WorkerLoad { prefill_tokens: 48, kv_pages_total: 8, ..Default::default() });
    second.say(ToConductor::Heartbeat(pb::Heartbeat { load, ..Default::default() })).await;
    metric(&bench, r#"tutti_worker_prefill_tokens{worker="1"}"#, 48).await;
    let mut submission = bench.cluster.submit(pb::RequestSpec { prompt: tokens, ..spec(1) }, None).unwrap();
    let launch = second.launched().await;
    second.finish(launch.key, &[0]).await;
    assert_eq!(read(&mut submission).await.1.unwrap().generated, 1);
}

#[tokio::test]
async fn the_memory_of_a_workers_device_is_a_metric_until_the_worker_is_gone() {
    let bench = Bench::new(limits(1)).await;
    let worker = bench.ready(0).await;
    let device_memory = Some(pb::DeviceMemory { used_bytes: 3 << 30, total_bytes: 8 << 30 });
    worker.say(ToConductor::Heartbeat(pb::Heartbeat { device_memory, ..Default::default() })).await;
    metric(&bench, r#"tutti_worker_device_memory_used_bytes{worker="0"}"#, 3 << 30).await;
    metric(&bench, r#"tutti_worker_device_memory_total_bytes{worker="0"}"#, 8 << 30).await;
    drop(worker);
    soon("the metric's end", async {
        while bench.metrics.encode().contains("tutti_worker_device_memory_used_bytes{") {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn joining_by_hand_takes_the_operators_token() {
    let private = Bench::new(limits(1)).await;
    assert!(private.try_join_with(hello(1), "").await.is_ok());
    let shared = Bench::with_workers_by_hand(limits(1), ByHand::WithToken(token("secret"))).await;
    assert!(shared.try_join_with(hello(1), "").await.is_err());
    assert!(shared.try_join_with(hello(1), "secret").await.is_ok());
    let closed = Bench::with_workers_by_hand(limits(1), ByHand::Refused).await;
    let error = closed.try_join_with(hello(1), "").await.err().unwrap();
    assert_eq!(error.field(), Some("join_token_file"));
}

#[tokio::test]
async fn a_strangers_call_is_refused_before_any_message_of_it_is_read() {
    let bench = Bench::with_workers_by_hand(limits(1), ByHand::WithToken(token("secret"))).await;
    for shown in ["", "guess"] {
        // The call never sends a message, so the answer cannot depend on a message.
        let (_to, messages) = mpsc::channel(1);
        let status = soon("the refusal", bench.call(messages, shown)).await.err().unwrap();
        assert_eq!(status.code(), Code::Unauthenticated, "{status}");
        assert_eq!(Error::from(status).field(), Some("join_token_file"));
    }
}

#[tokio::test]
async fn the_settings_of_connections_hold_for_workers_too() {
    let connections = ConnectionSettings { max_open: 1, ..ConnectionSettings::default() };
    let bench = Bench::with(limits(2), ByHand::Open, connections).await;
    let _first = bench.join(0).await;
    let second = soon("the end of the second connection", bench.try_join(hello(1))).await;
    assert!(second.is_err(), "it has joined over a connection too many");
}

#[tokio::test]
async fn a_checkpoint_that_cannot_be_loaded_ends_the_start_with_its_reason() {
    let bench = Bench::new(limits(2)).await;
    let worker = bench.join(0).await;
    let fault = Error::invalid("model", "model.safetensors is truncated");
    worker.say(ToConductor::LoadFailed(pb::LoadFailed { fault: Some(fault.clone().into()) })).await;
    assert_eq!(soon("the fatal error", bench.cluster.fatal()).await, fault);
}

#[tokio::test]
async fn once_started_a_load_failure_does_not_end_the_cluster() {
    let bench = Bench::new(limits(1)).await;
    drop(bench.ready(0).await);
    bench.wait_ready(|state| *state != State::Ok).await;
    let worker = bench.join(0).await;
    let fault = Error::invalid("model", "config.json is gone");
    worker.say(ToConductor::LoadFailed(pb::LoadFailed { fault: Some(fault.into()) })).await;
    bench.wait_ready(|state| matches!(state, State::Not(why) if why.contains("config.json is gone"))).await;
    assert_eq!(bench.cluster.fatal().now_or_never(), None);
}

#[tokio::test]
async fn a_worker_of_another_model_is_turned_away() {
    let bench = Bench::new(limits(2)).await;
    let _first = bench.ready(0).await;
    let mut second = bench.join(1).await;
    let mut other = ready();
    other.model.as_mut().unwrap().vocab_size = 101;
    second.say(ToConductor::Ready(other)).await;
    let error = second.turned_away().await;
    assert!(error.message().contains("is another than"), "{error}");
}

#[tokio::test]
async fn the_smallest_pool_is_everyones_limit() {
    let bench = Bench::new(limits(2)).await;
    let _first = bench.ready(0).await;
    let second = bench.join(1).await;
    let mut small = ready();
    small.model.as_mut().unwrap().max_request_tokens = 16;
    second.say(ToConductor::Ready(small)).await;
    bench.wait_ready(|state| *state == State::Ok).await;
    assert_eq!(bench.cluster.describe().unwrap().model.unwrap().max_request_tokens, 16);
    assert_eq!(bench.submit(14).unwrap_err().field(), Some("max_tokens"));
}
