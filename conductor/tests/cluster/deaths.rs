//! Deaths, stops, hangs and drains of workers that have requests.

use std::time::Duration;

use tutti_conductor::cluster::{Cause, Exit, Presence};
use tutti_proto::{
    Rank,
    cluster::v1::{self as pb, conductor_message::Message, worker_message::Message as ToConductor},
};
use tutti_runtime::{ErrorKind, health::State};

use crate::bench::{Bench, FakeWorker, hello, limits, metric, read, soon};

async fn two() -> (Bench, FakeWorker, FakeWorker) {
    let bench = Bench::new(limits(2)).await;
    let (first, second) = (bench.ready(0).await, bench.ready(1).await);
    (bench, first, second)
}

#[tokio::test]
async fn a_lost_workers_requests_go_on_at_another() {
    let (bench, mut first, mut second) = two().await;
    let mut submission = bench.submit(3).unwrap();
    let key = first.launched().await.key;
    first.step(key, &[0], None).await;
    metric(&bench, "tutti_generated_tokens_total", 1).await;
    drop(first);
    let again = second.launched().await;
    assert_eq!((again.key.unwrap().incarnation, again.generated), (1, vec![10]));
    second.step(again.key, &[1], None).await;
    second.finish(again.key, &[2]).await;
    let (indices, ending) = read(&mut submission).await;
    assert_eq!((indices, ending.unwrap().generated), (vec![0, 1, 2], 3));
    bench.idle().await;
    assert_eq!(bench.metric("tutti_request_replays_total"), 1);
}

#[tokio::test]
async fn without_another_worker_requests_wait_for_its_return() {
    let bench = Bench::new(limits(1)).await;
    let mut first = bench.ready(0).await;
    let mut submission = bench.submit(1).unwrap();
    first.launched().await;
    drop(first);
    metric(&bench, "tutti_workers_ready", 0).await;
    assert_eq!(
        bench.submit(1).unwrap_err().kind(),
        ErrorKind::Unavailable,
        "new requests are refused meanwhile"
    );
    let mut back = bench.ready(0).await;
    let key = back.launched().await.key;
    back.finish(key, &[0]).await;
    assert!(read(&mut submission).await.1.is_ok());
    bench.idle().await;
}

#[tokio::test]
async fn a_waiting_request_may_be_cancelled() {
    let bench = Bench::new(limits(1)).await;
    let mut first = bench.ready(0).await;
    let submission = bench.submit(1).unwrap();
    first.launched().await;
    drop(first);
    metric(&bench, "tutti_workers_ready", 0).await;
    drop(submission);
    bench.idle().await;
    let _back = bench.ready(0).await;
    assert!(bench.submit(1).is_ok());
}

#[tokio::test]
async fn a_request_that_crashes_its_workers_fails_alone() {
    let bench = Bench::new(limits(1)).await;
    let mut worker = bench.ready(0).await;
    let mut submissions = [bench.submit(1).unwrap(), bench.submit(1).unwrap()];
    // Both requests are on the worker at each of its two deaths, so either request may have caused the deaths.
    for _ in 0..2 {
        worker.launched().await;
        worker.launched().await;
        drop(worker);
        metric(&bench, "tutti_workers_ready", 0).await;
        worker = bench.ready(0).await;
    }
    // After the second death, the two requests never share a worker.
    assert_eq!(worker.launched().await.key.unwrap().request, 1);
    drop(worker);
    let error = read(&mut submissions[0]).await.1.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.message().contains("3 times") && error.message().contains("worker 0"), "{error}");
    metric(&bench, "tutti_workers_ready", 0).await;
    let mut worker = bench.ready(0).await;
    let key = worker.launched().await.key;
    worker.finish(key, &[0]).await;
    assert!(read(&mut submissions[1]).await.1.is_ok());
    bench.idle().await;
}

/// Sends a heartbeat with this count, and waits until it has arrived.
async fn beat(bench: &Bench, worker: &FakeWorker, rank: u32, forwards: u64) {
    let load = pb::WorkerLoad { steps: 1, trace_steps_lost: forwards, ..Default::default() };
    worker
        .say(ToConductor::Heartbeat(pb::Heartbeat { load: Some(load), forwards, ..Default::default() }))
        .await;
    // Any gauge of the load shows that the heartbeat has arrived.
    metric(bench, &format!(r#"tutti_trace_steps_lost{{worker="{rank}"}}"#), forwards).await;
}

#[tokio::test]
async fn a_worker_that_says_nothing_is_fenced_and_what_it_says_later_is_dropped() {
    let (bench, mut first, mut second) = two().await;
    let mut submission = bench.submit(2).unwrap();
    let key = first.launched().await.key;
    first.step(key, &[0], None).await;
    metric(&bench, "tutti_generated_tokens_total", 1).await;
    for tick in 1..=4 {
        assert_eq!(bench.metric("tutti_workers_ready"), 2, "{tick} s are not enough");
        beat(&bench, &second, 1, tick).await;
        bench.cluster.tick(Duration::from_secs(1));
    }
    assert_eq!(bench.metric(r#"tutti_workers_fenced_total{reason="stopped"}"#), 1);
    assert_eq!(bench.cluster.presence(Rank(0), 1000), Presence::Fenced);
    let again = second.launched().await;
    first.finish(key, &[1]).await;
    metric(&bench, "tutti_tokens_dropped_total", 1).await;
    assert_eq!(bench.metric(r#"tutti_completions_dropped_total{reason="stale"}"#), 1);
    assert_eq!(first.hear().await, None, "its stream ends");
    second.finish(again.key, &[1]).await;
    assert_eq!(read(&mut submission).await.0, [0, 1]);
    // The rank of the fenced worker is free.
    bench.ready(0).await;
}

#[tokio::test]
async fn a_worker_whose_step_hangs_is_fenced_and_one_with_a_long_step_or_no_work_is_not() {
    let bench = Bench::new(limits(3)).await;
    let (mut first, mut second, idle) = (bench.ready(0).await, bench.ready(1).await, bench.ready(2).await);
    let (_hangs, _long) = (bench.submit(2).unwrap(), bench.submit(2).unwrap());
    first.launched().await;
    second.launched().await;
    for tick in 1..=11 {
        assert_eq!(bench.metric("tutti_workers_ready"), 3, "{tick} s are not enough");
        // A change of this gauge is not progress.
        let load = pb::WorkerLoad { steps: 1, trace_steps_lost: tick, ..Default::default() };
        for (worker, rank) in [(&first, 0), (&idle, 2)] {
            worker
                .say(ToConductor::Heartbeat(pb::Heartbeat {
                    load: Some(load),
                    forwards: 1,
                    ..Default::default()
                }))
                .await;
            metric(&bench, &format!(r#"tutti_trace_steps_lost{{worker="{rank}"}}"#), tick).await;
        }
        beat(&bench, &second, 1, tick).await;
        bench.cluster.tick(Duration::from_secs(1));
    }
    assert_eq!(bench.metric(r#"tutti_workers_fenced_total{reason="hangs"}"#), 1);
    assert_eq!(bench.cluster.presence(Rank(0), 1000), Presence::Fenced);
    assert_eq!(bench.metric("tutti_workers_ready"), 2);
}

#[tokio::test]
async fn a_crash_loop_ends_readiness_until_a_process_stays_up() {
    let bench = Bench::new(limits(1)).await;
    let mut worker = bench.ready(0).await;
    for early_exits in 1..=3 {
        assert_eq!(bench.health.ready(), State::Ok);
        drop(worker);
        metric(&bench, "tutti_workers_ready", 0).await;
        bench
            .cluster
            .on_exit(Rank(0), &Exit { status: "signal: 11".into(), cause: Cause::Other, early_exits });
        worker = bench.ready(0).await;
    }
    let State::Not(why) = bench.health.ready() else { panic!("ready for how long?") };
    assert!(why.contains("worker 0: crash loop, 3 processes") && why.contains("signal: 11"), "{why}");
    bench.cluster.on_well(Rank(0));
    assert_eq!(bench.health.ready(), State::Ok);
}

#[tokio::test]
async fn a_request_fails_if_its_worker_never_comes_back() {
    let bench = Bench::new(limits(1)).await;
    let mut worker = bench.ready(0).await;
    let mut submission = bench.submit(1).unwrap();
    worker.launched().await;
    drop(worker);
    metric(&bench, "tutti_workers_ready", 0).await;
    for early_exits in 1..=3 {
        bench.cluster.tick(Duration::from_secs(1));
        assert_eq!(bench.metric("tutti_requests_in_flight"), 1, "it may come back");
        bench
            .cluster
            .on_exit(Rank(0), &Exit { status: "signal: 9".into(), cause: Cause::Other, early_exits });
    }
    bench.cluster.tick(Duration::from_secs(1));
    let error = read(&mut submission).await.1.unwrap_err();
    assert!(error.kind() == ErrorKind::Unavailable && error.message().contains("signal: 9"), "{error}");
    bench.idle().await;
}

#[tokio::test]
async fn a_drained_worker_finishes_what_it_has_and_gets_nothing_new() {
    let (bench, mut first, mut second) = two().await;
    let mut submission = bench.submit(1).unwrap();
    let key = first.launched().await.key;
    let phase = || bench.cluster.status().workers[0].phase();
    assert_eq!(bench.cluster.drain_worker(Rank(0)).unwrap(), pb::WorkerPhase::Draining);
    assert!(matches!(first.hear().await, Some(Message::Drain(_))));
    let _other = bench.submit(1).unwrap();
    second.launched().await;
    assert_eq!(phase(), pb::WorkerPhase::Draining);
    first.finish(key, &[0]).await;
    assert!(read(&mut submission).await.1.is_ok());
    drop(first);
    soon("drained", async {
        while phase() != pb::WorkerPhase::Drained {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(bench.health.ready(), State::Ok, "the other serves");
    assert_eq!(bench.cluster.drain_worker(Rank(7)).unwrap_err().kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn a_worker_that_wants_to_leave_is_drained_and_may_come_again() {
    let (bench, mut first, _second) = two().await;
    let mut submission = bench.submit(1).unwrap();
    let key = first.launched().await.key;
    first.say(ToConductor::Leaving(pb::Leaving {})).await;
    assert!(matches!(first.hear().await, Some(Message::Drain(_))));
    first.finish(key, &[0]).await;
    assert!(read(&mut submission).await.1.is_ok());
    drop(first);
    metric(&bench, "tutti_workers_ready", 1).await;
    bench.ready(0).await;
}

#[tokio::test]
async fn while_the_conductor_drains_a_worker_that_died_is_still_needed() {
    let bench = Bench::new(limits(1)).await;
    let mut worker = bench.ready(0).await;
    let mut submission = bench.submit(1).unwrap();
    worker.launched().await;
    bench.cluster.begin_drain();
    drop(worker);
    metric(&bench, "tutti_workers_ready", 0).await;
    let mut back = bench.ready(0).await;
    let key = back.launched().await.key;
    back.finish(key, &[0]).await;
    assert!(read(&mut submission).await.1.is_ok());
    bench.idle().await;
    bench.cluster.dismiss();
    assert!(bench.try_join(hello(1)).await.is_err());
}

/// A worker of this rank joins, and is killed before it is ready.
async fn killed_while_loading(bench: &Bench, rank: u32, early_exits: u32) {
    let worker = bench.join(rank).await;
    drop(worker);
    soon("the worker is lost", async {
        let is_here = || bench.cluster.presence(Rank(rank), 1000 + rank) == Presence::Here;
        while is_here() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    bench
        .cluster
        .on_exit(Rank(rank), &Exit { status: "signal: 9".into(), cause: Cause::Killed, early_exits });
}

#[tokio::test]
async fn the_start_ends_after_three_kills_while_loading() {
    let bench = Bench::new(limits(2)).await;
    for early_exits in 1..=2 {
        killed_while_loading(&bench, 0, early_exits).await;
        assert!(!bench.cluster.is_given_up(Rank(0)));
        let State::Not(why) = bench.health.ready() else { panic!("ready") };
        assert!(why.contains("killed while loading") && why.contains("likely for memory"), "{why}");
    }
    killed_while_loading(&bench, 0, 3).await;
    assert!(bench.cluster.is_given_up(Rank(0)) && !bench.cluster.is_given_up(Rank(1)));
    let error = soon("the fatal error", bench.cluster.fatal()).await;
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(
        error.message().contains("killed while loading") && error.message().contains("--quantize"),
        "{error}"
    );
}

#[tokio::test]
async fn a_cluster_that_serves_goes_on_without_a_rank_that_loading_kills() {
    let (bench, first, mut second) = two().await;
    drop(first);
    metric(&bench, "tutti_workers_ready", 1).await;
    // The process had loaded the model, so its own end does not count.
    bench
        .cluster
        .on_exit(Rank(0), &Exit { status: "signal: 9".into(), cause: Cause::Killed, early_exits: 1 });
    for early_exits in 2..=4 {
        assert!(!bench.cluster.is_given_up(Rank(0)));
        killed_while_loading(&bench, 0, early_exits).await;
    }
    assert!(bench.cluster.is_given_up(Rank(0)));
    let detail = bench.cluster.status().workers[0].detail.clone();
    assert!(detail.contains("given up") && detail.contains("likely for memory"), "{detail}");
    let _submission = bench.submit(1).unwrap();
    second.launched().await;
    // After a long pause it starts once more, and one more kill is enough.
    bench.cluster.retry_given_up(Rank(0));
    assert!(!bench.cluster.is_given_up(Rank(0)));
    killed_while_loading(&bench, 0, 5).await;
    assert!(bench.cluster.is_given_up(Rank(0)));
}
