//! Requests through a cluster: launched, cancelled, expired, refused, lost, drained.

use tokio_stream::StreamExt;
use tutti_conductor::{
    cluster::Limits,
    request::Origin,
    service::{ConductorServer, ConductorService},
};
use tutti_proto::cluster::v1::{
    self as pb, conductor_client::ConductorClient, conductor_message::Message,
    worker_message::Message as ToConductor,
};
use tutti_runtime::{Error, ErrorKind, checkpoint::Checkpoint, health::State, shutdown::Shutdown};
use tutti_settings::EngineSettings;

use crate::bench::{Bench, FakeWorker, limits, metric, read, ready, soon, spec};

/// A cluster of one ready worker.
async fn one() -> (Bench, FakeWorker) {
    let bench = Bench::new(limits(1)).await;
    let worker = bench.ready(0).await;
    (bench, worker)
}

#[tokio::test]
async fn a_request_runs_to_its_end_and_leaves_nothing() {
    let (bench, mut worker) = one().await;
    let mut submission = bench.submit(3).unwrap();
    let launch = worker.launched().await;
    assert_eq!((&launch.walks, &launch.spec), (&vec![0, 1], &Some(spec(3))));
    worker.step(launch.key, &[0], None).await;
    worker.step(launch.key, &[1], None).await;
    worker.finish(launch.key, &[2]).await;
    let (indices, ending) = read(&mut submission).await;
    assert_eq!((indices, ending.unwrap().generated), (vec![0, 1, 2], 3));
    bench.idle().await;
    assert_eq!(bench.metric(r#"tutti_kv_pages_used{worker="0"}"#), 0);
    assert_eq!(bench.metric(r#"tutti_requests_total{outcome="finished"}"#), 1);
    assert_eq!(bench.metric("tutti_generated_tokens_total"), 3);
}

#[tokio::test]
async fn a_request_continues_after_output_of_another_conductor() {
    let (bench, mut worker) = one().await;
    let mut submission = bench.cluster.resume(spec(3), None, vec![10], Origin::default()).unwrap();
    let launch = worker.launched().await;
    assert_eq!((&launch.generated, &launch.spec), (&vec![10], &Some(spec(3))));
    worker.step(launch.key, &[1], None).await;
    worker.finish(launch.key, &[2]).await;
    let (indices, ending) = read(&mut submission).await;
    assert_eq!((indices, ending.unwrap().generated), (vec![1, 2], 3));
    let error = bench.cluster.resume(spec(3), None, vec![10; 3], Origin::default()).unwrap_err();
    assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidArgument, Some("generated")));
    bench.idle().await;
}

#[tokio::test]
async fn a_dropped_stream_cancels_once() {
    let (bench, mut worker) = one().await;
    let submission = bench.submit(3).unwrap();
    let key = worker.launched().await.key;
    drop(submission);
    assert_eq!(worker.cancelled().await, key);
    worker.confirm_cancel(key).await;
    bench.idle().await;
    // The worker's next message is the next launch.
    let _next = bench.submit(3).unwrap();
    worker.launched().await;
}

#[tokio::test]
async fn an_operator_ends_the_request_that_is_meant_and_no_other() {
    let (bench, mut worker) = one().await;
    let (mut client, _directory) = client(&bench).await;
    let mut submission = bench.submit(3).unwrap();
    let launch = worker.launched().await;
    let id = submission.id();
    let shown = || bench.cluster.recent_requests(Some(id)).requests.pop().unwrap();
    let accepted_us = shown().transitions[0].at_us;
    for (request, accepted_us) in [(id.0 + 1, 0), (0, 0), (id.0, accepted_us - 1)] {
        let status =
            client.cancel_request(pb::CancelRequestRequest { request, accepted_us }).await.unwrap_err();
        let error = Error::from(status);
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.message().contains(&format!("request {request} ")), "{error}");
    }
    client.cancel_request(pb::CancelRequestRequest { request: id.0, accepted_us }).await.unwrap();
    assert_eq!(worker.cancelled().await, launch.key);
    let error = read(&mut submission).await.1.unwrap_err();
    assert_eq!(
        (error.kind(), error.message()),
        (ErrorKind::Cancelled, "an operator has cancelled the request")
    );
    let ended = shown().transitions.pop().unwrap().transition;
    let Some(pb::request_transition::Transition::Ended(ended)) = ended else { panic!("{ended:?}") };
    assert_eq!((ended.outcome.as_str(), ended.cause.as_str()), ("cancelled", error.message()));
    // The worker still holds the request, but there is nothing left to cancel.
    let again = client.cancel_request(pb::CancelRequestRequest { request: id.0, accepted_us: 0 }).await;
    assert_eq!(Error::from(again.unwrap_err()).kind(), ErrorKind::NotFound);
    worker.confirm_cancel(launch.key).await;
    bench.idle().await;
    assert_eq!(bench.metric(r#"tutti_requests_total{outcome="cancelled"}"#), 1);
}

#[tokio::test]
async fn a_stream_that_was_read_to_its_end_cancels_nothing() {
    let (bench, mut worker) = one().await;
    let mut submission = bench.submit(1).unwrap();
    let key = worker.launched().await.key;
    worker.finish(key, &[0]).await;
    read(&mut submission).await.1.unwrap();
    drop(submission);
    let _next = bench.submit(1).unwrap();
    worker.launched().await;
}

#[tokio::test]
async fn a_deadline_passes_even_if_the_stream_is_not_read() {
    let (bench, mut worker) = one().await;
    let mut submission = bench.cluster.submit(spec(3), Some(200)).unwrap();
    let launch = worker.launched().await;
    let told = launch.timeout_ms.expect("the worker is told the deadline, but ignores it");
    assert!(told <= 200, "{told} ms are left");
    let key = launch.key;
    assert_eq!(worker.cancelled().await, key);
    let error = read(&mut submission).await.1.unwrap_err();
    assert_eq!((error.kind(), error.message().contains("200 ms")), (ErrorKind::DeadlineExceeded, true));
    worker.confirm_cancel(key).await;
    bench.idle().await;
    assert_eq!(bench.metric(r#"tutti_requests_total{outcome="deadline_exceeded"}"#), 1);
}

#[tokio::test]
async fn a_request_without_time_is_refused_on_arrival() {
    let (bench, mut worker) = one().await;
    let error = bench.cluster.submit(spec(3), Some(0)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(bench.metric(r#"tutti_requests_refused_total{reason="deadline"}"#), 1);
    // The worker's next message is the next request, with all its fields.
    let wanted = pb::RequestSpec { priority: -8, ..spec(3) };
    let _next = bench.cluster.submit(wanted.clone(), None).unwrap();
    let launch = worker.launched().await;
    assert_eq!((launch.spec, launch.timeout_ms), (Some(wanted), None));
}

/// The settings allow 128 requests per worker, which is the default. This worker's memory has slots for only two.
#[tokio::test]
async fn the_bound_counts_the_requests_that_workers_say_they_run() {
    let engine = EngineSettings::default();
    assert_eq!(engine.running_limit(), 128);
    let bench = Bench::new(Limits { engine, ..limits(1) }).await;
    let worker = bench.ready_with(0, pb::Ready { running_limit: Some(2), ..ready() }).await;
    let _running: Vec<_> = (0..3).map(|_| bench.submit(1).unwrap()).collect();
    let error = bench.submit(1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Overloaded);
    assert!(error.message().contains("the limit is 3"), "{error}");
    drop(worker);
}

#[tokio::test]
async fn beyond_the_bound_a_request_is_told_to_come_back() {
    let (bench, mut worker) = one().await;
    let running = bench.submit(1).unwrap();
    let _queued = bench.submit(1).unwrap();
    let error = bench.submit(1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Overloaded);
    assert!(error.retry_after().is_some() && error.message().contains('2'), "{error}");
    // A cancelled request counts until its worker has confirmed.
    let key = worker.launched().await.key;
    drop(running);
    assert!(bench.submit(1).is_err());
    worker.launched().await;
    worker.cancelled().await;
    worker.confirm_cancel(key).await;
    soon("room", async {
        while bench.metric("tutti_requests_in_flight") == 2 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert!(bench.submit(1).is_ok());
}

#[tokio::test]
async fn two_workers_share_the_load() {
    let bench = Bench::new(limits(2)).await;
    let (mut first, mut second) = (bench.ready(0).await, bench.ready(1).await);
    let _submissions = [bench.submit(1).unwrap(), bench.submit(1).unwrap()];
    first.launched().await;
    second.launched().await;
}

#[tokio::test]
async fn a_failed_request_keeps_its_kind_and_field() {
    let (bench, mut worker) = one().await;
    let mut submission = bench.submit(1).unwrap();
    let key = worker.launched().await.key;
    let fault = Error::invalid("max_tokens", "is over what is free");
    worker.step(key, &[], Some(pb::completion::Outcome::Failed(fault.clone().into()))).await;
    assert_eq!(read(&mut submission).await.1, Err(fault));
    assert_eq!(bench.metric(r#"tutti_requests_total{outcome="failed"}"#), 1);
}

#[tokio::test]
async fn a_worker_s_refusal_is_counted_as_one_by_reason() {
    let (bench, mut worker) = one().await;
    let mut submission = bench.submit(1).unwrap();
    let key = worker.launched().await.key;
    let fault = Error::invalid("max_tokens", "is over what is free");
    worker.step(key, &[], Some(pb::completion::Outcome::Refused(fault.clone().into()))).await;
    assert_eq!(read(&mut submission).await.1, Err(fault));
    assert_eq!(bench.metric(r#"tutti_requests_total{outcome="refused"}"#), 1);
    assert_eq!(bench.metric(r#"tutti_requests_refused_total{reason="invalid"}"#), 1);
    bench.idle().await;
}

#[tokio::test]
async fn stale_and_unknown_completions_are_counted_and_change_nothing() {
    let (bench, mut worker) = one().await;
    let mut submission = bench.submit(1).unwrap();
    let key = worker.launched().await.key;
    let other = |request, incarnation| Some(pb::GraphKey { request, incarnation, ..key.unwrap() });
    worker.finish(other(99, 0), &[0]).await;
    worker.finish(other(1, 7), &[0]).await;
    worker.finish(key, &[0]).await;
    worker.finish(key, &[0]).await;
    assert_eq!(read(&mut submission).await, (vec![0], Ok(finished(1))));
    soon("the last report is in", async {
        while bench.metric(r#"tutti_completions_dropped_total{reason="stale"}"#) != 1 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(bench.metric(r#"tutti_completions_dropped_total{reason="unknown"}"#), 2);
    assert_eq!(bench.metric("tutti_tokens_dropped_total"), 3);
}

fn finished(generated: u32) -> pb::Finished {
    pb::Finished { reason: pb::FinishReason::Length.into(), generated, ..Default::default() }
}

#[tokio::test]
async fn a_drain_lets_requests_finish_and_then_sends_the_workers_away() {
    let (bench, mut worker) = one().await;
    let mut submission = bench.submit(1).unwrap();
    let key = worker.launched().await.key;
    bench.cluster.begin_drain();
    assert_eq!(bench.health.ready(), State::Not("draining".into()));
    assert_eq!(bench.submit(1).unwrap_err().kind(), ErrorKind::Unavailable);
    worker.finish(key, &[0]).await;
    assert!(read(&mut submission).await.1.is_ok());
    bench.idle().await;
    bench.cluster.dismiss();
    assert!(matches!(worker.hear().await, Some(Message::Drain(_))));
}

#[tokio::test]
async fn requests_that_outlast_the_drain_fail() {
    let (bench, mut worker) = one().await;
    let mut submission = bench.submit(1).unwrap();
    let key = worker.launched().await.key;
    bench.cluster.begin_drain();
    bench.cluster.dismiss();
    assert_eq!(read(&mut submission).await.1.unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(worker.cancelled().await, key);
}

/// A router's client of the cluster, and the checkpoint's directory.
async fn client(bench: &Bench) -> (ConductorClient<ConductorServer<ConductorService>>, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("config.json"), "{}").unwrap();
    std::fs::write(directory.path().join("tokenizer.json"), vec![b'x'; (2 << 20) + 1]).unwrap();
    let checkpoint = Checkpoint::open(directory.path(), "tiny").unwrap();
    let service =
        ConductorService::new(bench.cluster.clone(), checkpoint.into(), Shutdown::default()).into_server();
    (ConductorClient::new(service), directory)
}

#[tokio::test]
async fn a_router_submits_and_cancels_by_dropping() {
    let (bench, mut worker) = one().await;
    let (mut client, _directory) = client(&bench).await;
    let request = pb::SubmitRequest { spec: Some(spec(3)), ..Default::default() };
    let mut events = client.submit(request).await.unwrap().into_inner();
    let key = worker.launched().await.key;
    worker.step(key, &[0], None).await;
    assert_eq!(soon("a token", events.next()).await.unwrap().unwrap().tokens.len(), 1);
    drop(events);
    assert_eq!(worker.cancelled().await, key);
}

#[tokio::test]
async fn a_refusal_reaches_the_router_with_its_field() {
    let (bench, _worker) = one().await;
    let (mut client, _directory) = client(&bench).await;
    let request = pb::SubmitRequest { spec: Some(spec(1000)), ..Default::default() };
    let error = Error::from(client.submit(request).await.unwrap_err());
    assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidArgument, Some("max_tokens")));
    let request = pb::SubmitRequest { spec: Some(spec(1)), timeout_ms: Some(0), ..Default::default() };
    let error = Error::from(client.submit(request).await.unwrap_err());
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
}

#[tokio::test]
async fn checkpoint_files_come_in_pieces_and_missing_ones_are_not_found() {
    let bench = Bench::new(limits(1)).await;
    let (mut client, _directory) = client(&bench).await;
    let ask = |file: pb::CheckpointFile| pb::ReadCheckpointFileRequest { file: file.into() };
    let pieces = client.read_checkpoint_file(ask(pb::CheckpointFile::Tokenizer)).await.unwrap().into_inner();
    let sizes: Vec<usize> = pieces.map(|piece| piece.unwrap().data.len()).collect().await;
    assert_eq!(sizes, [1 << 20, 1 << 20, 1]);
    let missing = client.read_checkpoint_file(ask(pb::CheckpointFile::ChatTemplate)).await.unwrap_err();
    assert_eq!(missing.code(), tonic::Code::NotFound);
}

#[tokio::test]
async fn the_balance_of_experts_is_a_metric_per_layer_until_the_worker_is_gone() {
    let (bench, worker) = one().await;
    let loads = |most| {
        let load = |(layer, experts, tokens, most)| pb::ExpertLoad { layer, experts, tokens, most };
        [(1, 8, 24, most), (3, 4, 8, 2), (1 << 20, 4, 8, 2), (5, 0, 0, 0)].map(load).to_vec()
    };
    let report = async |expert_loads, count| {
        let load = Some(pb::WorkerLoad { trace_steps_lost: count, ..Default::default() });
        worker
            .say(ToConductor::StepReport(pb::StepReport { expert_loads, load, ..Default::default() }))
            .await;
        metric(&bench, r#"tutti_trace_steps_lost{worker="0"}"#, count).await;
    };
    let shown = || {
        let text = bench.metrics.encode();
        let lines = text.lines().filter_map(|line| line.strip_prefix("tutti_worker_expert_imbalance"));
        let mut lines: Vec<_> = lines.map(str::to_owned).collect();
        lines.sort();
        lines
    };
    report(loads(12), 1).await;
    assert_eq!(shown(), [r#"{worker="0",layer="1"} 4.0"#, r#"{worker="0",layer="3"} 1.0"#]);
    // A report without expert loads changes no gauge.
    report(Vec::new(), 2).await;
    report(loads(9), 3).await;
    assert_eq!(shown(), [r#"{worker="0",layer="1"} 3.0"#, r#"{worker="0",layer="3"} 1.0"#]);
    drop(worker);
    soon("no metric of a lost worker", async {
        while !shown().is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}
