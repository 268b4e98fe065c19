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
    pool.push(guides.iter().map(|guide| Job::new(guide.clone(), Work::Open(Vec::new()))));
    pool.forget(guides[1].key());
    go.send(()).unwrap();
    let mut told = Vec::new();
    while told.len() < 2 {
        pool.wait_for_event();
        told.extend(pool.take_events().into_iter().map(|key| key.request.0));
    }
    told.sort_unstable();
    assert_eq!((told, pool.counts().compilations), (vec![1, 3], 2));
    assert!(matches!(guides[1].next_or_await(), Next::Pending));
}

/// A long replay beside a first mask: the pool's thread could turn to another job between any two parts.
#[test]
fn a_long_replay_is_done_in_parts() {
    let pool = MaskPool::start(Arc::new(|| Ok(testing::bytes())), Waker::default()).unwrap();
    let guide = |request, pattern: &str, generated: &[u32]| {
        let guide = Guide::of(Guided {
            key: pb::GraphKey { request, ..Default::default() }.into(),
            constraint: Some(Constraint::new(Kind::Regex(pattern.to_owned()))),
            thinking: None,
            generated,
            stop_tokens: &[],
            vocabulary: 257,
        });
        let guide = guide.unwrap();
        assert!(guide.await_next());
        guide
    };
    let parts = 20;
    let output = vec![u32::from(b'a'); parts * 256];
    let replayed = guide(1, "a*b", &output);
    let first = guide(2, "c", &[]);
    pool.push([
        Job::new(replayed.clone(), Work::Open(output)),
        Job::new(first.clone(), Work::Open(Vec::new())),
    ]);
    let mut told = Vec::new();
    while told.len() < 2 {
        pool.wait_for_event();
        told.extend(pool.take_events().into_iter().map(|key| key.request.0));
    }
    assert_eq!(told, [2, 1]);
    // Beside the parts, two jobs open the constraints.
    assert!(lock(&pool.shared.queues).taken >= parts + 2);
    let Next::Ready(next) = replayed.next_or_await() else { panic!("{:?}", replayed.next_or_await()) };
    let mask = next.mask.unwrap();
    assert!(mask.allows(u32::from(b'a')) && mask.allows(u32::from(b'b')) && !mask.allows(u32::from(b'c')));
}

#[test]
fn the_replay_of_an_ended_request_does_not_go_on() {
    let pool = MaskPool::start(Arc::new(|| Ok(testing::bytes())), Waker::default()).unwrap();
    let ended = guide(1);
    ended.end();
    pool.shared.go_on(ended, Replay { tokens: vec![97], done: 0 });
    assert!(lock(&pool.shared.queues).replays.is_empty());
}
