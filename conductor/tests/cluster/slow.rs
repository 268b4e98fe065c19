//! Workers whose steps take far longer than their peers', and requests that wait beside free workers.

use std::time::Duration;

use tutti_conductor::cluster::Limits;
use tutti_proto::cluster::v1::{self as pb, worker_message::Message as ToConductor};
use tutti_settings::FaultSettings;

use crate::bench::{Bench, FakeWorker, limits, metric, read};

/// Number of steps that are compared.
const STEPS: u32 = 8;

/// Limits of a cluster whose workers run this many requests at a time.
fn limits_of(workers: u32, running: u32) -> Limits {
    let mut limits = limits(workers);
    limits.engine.max_running_requests = Some(running as usize);
    limits.faults = FaultSettings {
        slow_worker_steps: STEPS,
        slow_worker_pause: 2,
        heartbeat_timeout: 60,
        ..limits.faults
    };
    limits
}

/// Reports as many steps as are compared, each of which took this long, and waits until they have arrived.
async fn steps(bench: &Bench, worker: &FakeWorker, rank: u32, ms: u32) {
    let name = format!(r#"tutti_trace_steps_lost{{worker="{rank}"}}"#);
    let before = bench.metric(&name);
    for step in 1..=u64::from(STEPS) {
        let work = pb::StepWork { run_us: 1000 * ms, tokens: 3, decode_rows: 3, ..Default::default() };
        let load = pb::WorkerLoad { trace_steps_lost: before + step, kv_pages_used: 3, ..Default::default() };
        let report = pb::StepReport { work: Some(work), load: Some(load), ..Default::default() };
        worker.say(ToConductor::StepReport(report)).await;
    }
    metric(bench, &name, before + u64::from(STEPS)).await;
}

/// Reports steps of these times at these workers for as long as a worker must be slow.
async fn judge(bench: &Bench, reports: &[(u32, &FakeWorker, u32)]) {
    for _ in 0..4 {
        for (rank, worker, ms) in reports {
            steps(bench, worker, *rank, *ms).await;
        }
        bench.cluster.tick(Duration::from_secs(1));
    }
}

fn slow(bench: &Bench, rank: u32) -> bool {
    bench.metric(&format!(r#"tutti_worker_slow{{worker="{rank}"}}"#)) == 1
}

fn detail(bench: &Bench, rank: u32) -> String {
    bench.cluster.status().workers.into_iter().find(|worker| worker.worker == rank).unwrap().detail
}

#[tokio::test]
async fn a_worker_far_off_its_peers_gets_no_requests_until_it_is_tried_again() {
    let bench = Bench::new(limits_of(2, 8)).await;
    let (mut first, mut second) = (bench.ready(0).await, bench.ready(1).await);
    steps(&bench, &first, 0, 200).await;
    steps(&bench, &second, 1, 10).await;
    (0..8).for_each(|_| bench.cluster.tick(Duration::from_secs(1)));
    assert!(!slow(&bench, 0), "a burst is not enough");
    // Nor is the time that passes without steps: only the next ones tell.
    steps(&bench, &first, 0, 200).await;
    steps(&bench, &second, 1, 10).await;
    bench.cluster.tick(Duration::from_secs(1));
    assert!(slow(&bench, 0) && !slow(&bench, 1));
    assert!(
        detail(&bench, 0).starts_with("slow: its steps take at least 20.0 times as long"),
        "{}",
        detail(&bench, 0)
    );
    assert_eq!(bench.cluster.status().workers[0].phase(), pb::WorkerPhase::Ready);
    let submissions: Vec<_> = (0..4).map(|_| bench.submit(1).unwrap()).collect();
    for _ in &submissions {
        second.launched().await;
    }
    bench.cluster.tick(Duration::from_secs(1));
    assert!(slow(&bench, 0));
    bench.cluster.tick(Duration::from_secs(1));
    assert!(!slow(&bench, 0));
    assert!(detail(&bench, 0).starts_with("was slow: is tried with one request"), "{}", detail(&bench, 0));
    let _more = [bench.submit(1).unwrap(), bench.submit(1).unwrap()];
    first.launched().await;
    second.launched().await;
    // Its earlier steps do not count against it.
    judge(&bench, &[(1, &second, 10)]).await;
    assert!(!slow(&bench, 0) && detail(&bench, 0).is_empty());
    judge(&bench, &[(0, &first, 200), (1, &second, 10)]).await;
    assert!(slow(&bench, 0));
    assert_eq!(bench.metric(r#"tutti_workers_slowed_total{worker="0"}"#), 2);
}

#[tokio::test]
async fn workers_that_are_all_slow_serve_on() {
    let bench = Bench::new(limits_of(2, 8)).await;
    let (first, second) = (bench.ready(0).await, bench.ready(1).await);
    judge(&bench, &[(0, &first, 2000)]).await;
    assert!(!slow(&bench, 0), "it has nothing to be compared with");
    judge(&bench, &[(0, &first, 2000), (1, &second, 1900)]).await;
    assert!(!slow(&bench, 0) && !slow(&bench, 1));
}

#[tokio::test]
async fn slow_workers_are_the_last_resort() {
    let bench = Bench::new(limits_of(3, 8)).await;
    let (mut first, mut second) = (bench.ready(0).await, bench.ready(1).await);
    let mut third = bench.ready(2).await;
    judge(&bench, &[(0, &first, 100), (1, &second, 300), (2, &third, 10)]).await;
    assert_eq!([0, 1, 2].map(|rank| slow(&bench, rank)), [true, true, false]);
    let mut submission = bench.submit(1).unwrap();
    third.launched().await;
    // The only worker of its pace dies: its request goes on at a slow one.
    drop(third);
    let again = tokio::select! {
        launch = first.launched() => (launch, &first),
        launch = second.launched() => (launch, &second),
    };
    assert_eq!(again.0.key.unwrap().incarnation, 1);
    again.1.finish(again.0.key, &[0]).await;
    assert!(read(&mut submission).await.1.is_ok());
    // The fastest of them is tried at once.
    bench.cluster.tick(Duration::from_secs(1));
    assert_eq!([0, 1].map(|rank| slow(&bench, rank)), [false, true]);
    // The last worker is not set aside, however slow it is.
    drop(second);
    metric(&bench, "tutti_workers_ready", 1).await;
    judge(&bench, &[(0, &first, 5000)]).await;
    assert!(!slow(&bench, 0));
}

#[tokio::test]
async fn a_slower_worker_gets_fewer_requests() {
    let mut limits = limits_of(2, 8);
    limits.faults.slow_worker_ratio = 0;
    let bench = Bench::new(limits).await;
    let (mut first, mut second) = (bench.ready(0).await, bench.ready(1).await);
    judge(&bench, &[(0, &first, 40), (1, &second, 10)]).await;
    assert!(!slow(&bench, 0), "no worker is slow by these settings");
    // A block costs four times as much at the first worker.
    let submissions: Vec<_> = (0..4).map(|_| bench.submit(1).unwrap()).collect();
    for _ in 0..3 {
        second.launched().await;
    }
    first.launched().await;
    drop(submissions);
}

#[tokio::test]
async fn a_request_that_waits_moves_to_a_worker_that_becomes_free() {
    let mut limits = limits_of(2, 1);
    limits.faults.max_queued_requests = 8;
    let bench = Bench::new(limits).await;
    let (mut first, mut second) = (bench.ready(0).await, bench.ready(1).await);
    let mut submissions: Vec<_> = (0..3).map(|_| bench.submit(2).unwrap()).collect();
    let (running, other, waiting) =
        (first.launched().await.key, second.launched().await.key, first.launched().await.key);
    first.step(running, &[0], None).await;
    metric(&bench, "tutti_generated_tokens_total", 1).await;
    bench.cluster.tick(Duration::ZERO);
    assert_eq!(bench.metric("tutti_requests_moved_total"), 0, "no worker is free");
    second.finish(other, &[0, 1]).await;
    assert!(read(&mut submissions[1]).await.1.is_ok());
    bench.cluster.tick(Duration::ZERO);
    assert_eq!(first.cancelled().await, waiting);
    let moved = second.launched().await.key.unwrap();
    assert_eq!((moved.request, moved.incarnation), (waiting.unwrap().request, 1));
    first.confirm_cancel(waiting).await;
    second.finish(Some(moved), &[0, 1]).await;
    assert_eq!(read(&mut submissions[2]).await.0, [0, 1]);
    first.finish(running, &[1]).await;
    assert_eq!(read(&mut submissions[0]).await.0, [0, 1]);
    bench.idle().await;
    let counts = ["tutti_requests_moved_total", "tutti_request_replays_total"].map(|name| bench.metric(name));
    assert_eq!(counts, [1, 0]);
}

#[tokio::test]
async fn what_a_worker_is_about_to_begin_stays_there() {
    let mut limits = limits_of(2, 1);
    limits.faults.max_queued_requests = 8;
    let bench = Bench::new(limits).await;
    let (mut first, mut second) = (bench.ready(0).await, bench.ready(1).await);
    let mut submissions: Vec<_> = (0..4).map(|_| bench.submit(1).unwrap()).collect();
    let (_oldest, other, waiting) =
        (first.launched().await, second.launched().await.key, first.launched().await.key);
    let last = second.launched().await.key;
    for (key, submission) in [(other, 1), (last, 3)] {
        second.finish(key, &[0]).await;
        assert!(read(&mut submissions[submission]).await.1.is_ok());
    }
    // No step of the first worker has been reported yet, but its older request is in one.
    bench.cluster.tick(Duration::ZERO);
    assert_eq!(first.cancelled().await, waiting);
    assert_eq!(second.launched().await.key.unwrap().request, waiting.unwrap().request);
}

#[tokio::test]
async fn what_has_begun_stays_at_a_slow_worker() {
    let bench = Bench::new(limits_of(2, 8)).await;
    let (mut first, mut second) = (bench.ready(0).await, bench.ready(1).await);
    let mut submissions: Vec<_> = (0..4).map(|_| bench.submit(2).unwrap()).collect();
    let (decoding, _, prefilling) =
        (first.launched().await.key, second.launched().await, first.launched().await.key);
    second.launched().await;
    let _third = bench.submit(2).unwrap();
    let waiting = first.launched().await.key;
    first.step(decoding, &[0], None).await;
    let row = pb::PrefillRow { request: prefilling.unwrap().request, tokens: 2 };
    first.say(ToConductor::StepReport(pb::StepReport { prefills: vec![row], ..Default::default() })).await;
    judge(&bench, &[(0, &first, 500), (1, &second, 10)]).await;
    assert!(slow(&bench, 0));
    assert_eq!(first.cancelled().await, waiting);
    assert_eq!(second.launched().await.key.unwrap().request, waiting.unwrap().request);
    first.finish(decoding, &[1]).await;
    assert_eq!(read(&mut submissions[0]).await.0, [0, 1]);
    first.finish(prefilling, &[0, 1]).await;
    assert_eq!(read(&mut submissions[2]).await.0, [0, 1]);
    assert_eq!(bench.metric("tutti_requests_moved_total"), 1);
}
