use std::sync::mpsc;

use tutti_constraints::{Constraint, Kind};
use tutti_proto::cluster::v1 as pb;

use super::{super::Guided, *};
use crate::masks::testing;

fn guide(request: u64) -> Guide {
    let guide = Guide::of(Guided {
        key: pb::GraphKey { request, ..Default::default() }.into(),
        constraint: Some(Constraint::new(Kind::Regex(format!("a{{{request}}}")))),
        thinking: None,
        generated: &[],
        stop_tokens: &[],
        vocabulary: 257,
    });
    guide.unwrap()
}

fn job(request: u64) -> Job {
    Job { guide: guide(request), work: Work::Advance(0) }
}

#[test]
fn no_kind_of_job_waits_for_ever() {
    let jobs = |first: u64| (first..first + 8).map(job).collect();
    let mut queues = Queues { quick: jobs(0), known: jobs(100), slow: jobs(200), ..Queues::default() };
    let taken: Vec<u64> = (0..8).map(|_| queues.pop().unwrap().guide.key().request.0).collect();
    assert_eq!(taken, [0, 100, 1, 200, 2, 101, 3, 201]);
    queues.quick.clear();
    queues.slow.clear();
    assert_eq!(queues.pop().unwrap().guide.key().request.0, 102);
}

#[test]
fn the_job_of_an_ended_request_is_not_done() {
    // The first job waits for the vocabulary until the test has forgotten the second request.
    let (go, wait) = mpsc::channel::<()>();
    let wait = Mutex::new(wait);
    let read: ReadVocabulary = Arc::new(move || {
        let _ = lock(&wait).recv();
        Ok(testing::bytes())
    });
    let pool = MaskPool::start(read, Waker::default()).unwrap();
    let guides = [1, 2, 3].map(guide);
    guides.iter().for_each(|guide| assert!(guide.await_next()));
    pool.push(guides.iter().map(|guide| Job { guide: guide.clone(), work: Work::Open(Vec::new()) }));
    pool.forget(guides[1].key());
    go.send(()).unwrap();
    let mut told = Vec::new();
    while told.len() < 2 {
        pool.wait_for_event();
        told.extend(pool.take_events().into_iter().map(|key| key.request.0));
    }
    told.sort_unstable();
    assert_eq!((told, pool.counts().compilations), (vec![1, 3], 2));
    assert!(matches!(guides[1].next(), Next::Pending));
}
