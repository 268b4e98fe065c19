//! Workers that die with requests on them.

use tutti_runtime::ErrorKind;

use crate::bench::{Bench, FakeWorker, limits, read, soon};

/// Until a metric has this value.
async fn metric(bench: &Bench, name: &str, value: u64) {
    soon(name, async {
        while bench.metric(name) != value {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

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
async fn without_another_they_wait_for_it_to_be_back() {
    let bench = Bench::new(limits(1)).await;
    let mut first = bench.ready(0).await;
    let mut submission = bench.submit(1).unwrap();
    first.launched().await;
    drop(first);
    metric(&bench, "tutti_workers_ready", 0).await;
    assert_eq!(bench.submit(1).unwrap_err().kind(), ErrorKind::Unavailable, "the door is shut meanwhile");
    let mut back = bench.ready(0).await;
    let key = back.launched().await.key;
    back.finish(key, &[0]).await;
    assert!(read(&mut submission).await.1.is_ok());
    bench.idle().await;
}

#[tokio::test]
async fn one_that_waits_may_be_cancelled() {
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
async fn what_brings_every_worker_down_fails_and_takes_no_other_with_it() {
    let bench = Bench::new(limits(1)).await;
    let mut worker = bench.ready(0).await;
    let mut submissions = [bench.submit(1).unwrap(), bench.submit(1).unwrap()];
    // Both are there when it goes down, twice; which of them it is, nobody can know.
    for _ in 0..2 {
        worker.launched().await;
        worker.launched().await;
        drop(worker);
        metric(&bench, "tutti_workers_ready", 0).await;
        worker = bench.ready(0).await;
    }
    // So from then on each has a worker without the other.
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
