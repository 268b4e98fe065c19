use std::sync::mpsc;

use super::*;

/// Starts a queue. With a seed, the queue holds work back for at most 5 ms.
fn start(seed: Option<u64>) -> Arc<Queue> {
    Queue::start(seed.map(|seed| Order { seed, patience: Duration::from_millis(5) }))
}

/// Returns an entry whose work sends a number.
fn tell(sender: &mpsc::Sender<u32>, number: u32) -> Entry {
    let sender = sender.clone();
    Entry::Run(Box::new(move || {
        sender.send(number).unwrap();
        Ok(())
    }))
}

/// Runs three streams of three entries each, and returns the numbers `10 * stream + entry` in the order of execution.
fn order(seed: Option<u64>) -> Vec<u32> {
    let queue = start(seed);
    let (sender, receiver) = mpsc::channel();
    let lines: Vec<u64> = (0..3).map(|_| queue.open(StreamKind::NonBlocking)).collect();
    let gate = hold(&queue);
    for entry in 0..3 {
        for (stream, line) in lines.iter().enumerate() {
            queue.submit(*line, tell(&sender, 10 * stream as u32 + entry)).unwrap();
        }
    }
    drop(gate);
    queue.wait_for_all().unwrap();
    queue.shut();
    receiver.try_iter().collect()
}

/// Keeps the queue's thread busy until the returned sender is dropped. A test can thus submit several entries before
/// the first one runs.
fn hold(queue: &Queue) -> mpsc::Sender<()> {
    let (gate, closed) = mpsc::channel::<()>();
    let work = move || {
        let _ = closed.recv();
        Ok(())
    };
    queue.submit(LEGACY, Entry::Run(Box::new(work))).unwrap();
    gate
}

#[test]
fn without_a_seed_work_runs_as_submitted() {
    assert_eq!(order(None), [0, 10, 20, 1, 11, 21, 2, 12, 22]);
}

#[test]
fn a_seed_shuffles_streams_and_keeps_the_order_inside_each() {
    let orders: Vec<_> = (0..8).map(|seed| order(Some(seed))).collect();
    for order in &orders {
        for stream in 0..3 {
            let own: Vec<u32> = order.iter().copied().filter(|n| n / 10 == stream).collect();
            assert_eq!(own, [10 * stream, 10 * stream + 1, 10 * stream + 2]);
        }
    }
    assert!(orders.iter().any(|order| *order != orders[0]), "all seeds gave {:?}", orders[0]);
}

#[test]
fn a_wait_holds_a_stream_until_the_event_of_another_is_past() {
    for seed in [None, Some(1), Some(2), Some(3)] {
        let queue = start(seed);
        let (sender, receiver) = mpsc::channel();
        let (first, second) = (queue.open(StreamKind::NonBlocking), queue.open(StreamKind::NonBlocking));
        let point = Arc::new(Point::default());
        queue.submit(first, tell(&sender, 1)).unwrap();
        queue.submit(first, Entry::Record(point.clone())).unwrap();
        queue.submit(second, Entry::Wait(point.clone())).unwrap();
        queue.submit(second, tell(&sender, 2)).unwrap();
        queue.wait_for_line(second).unwrap();
        assert!(point.is_past());
        assert_eq!(receiver.try_iter().collect::<Vec<_>>(), [1, 2], "seed {seed:?}");
        queue.shut();
    }
}

#[test]
fn the_legacy_stream_is_ordered_with_blocking_streams_alone() {
    for seed in 0..8 {
        let queue = start(Some(seed));
        let (sender, receiver) = mpsc::channel();
        let blocking = queue.open(StreamKind::Blocking);
        queue.submit(blocking, tell(&sender, 1)).unwrap();
        queue.submit(LEGACY, tell(&sender, 2)).unwrap();
        queue.submit(blocking, tell(&sender, 3)).unwrap();
        queue.wait_for_all().unwrap();
        assert_eq!(receiver.try_iter().collect::<Vec<_>>(), [1, 2, 3], "seed {seed}");
        queue.shut();
    }
}

#[test]
fn seeded_work_goes_on_without_a_waiting_host() {
    let queue = start(Some(5));
    let (sender, receiver) = mpsc::channel();
    queue.submit(LEGACY, tell(&sender, 1)).unwrap();
    assert_eq!(receiver.recv_timeout(Duration::from_secs(20)), Ok(1));
    queue.shut();
}

#[test]
fn an_error_is_sticky_and_drops_what_has_not_run() {
    let queue = start(None);
    let (sender, receiver) = mpsc::channel();
    let (gate, point) = (hold(&queue), Arc::new(Point::default()));
    queue.submit(LEGACY, Entry::Run(Box::new(|| Err(Error::ILLEGAL_ADDRESS)))).unwrap();
    queue.submit(LEGACY, tell(&sender, 1)).unwrap();
    queue.submit(LEGACY, Entry::Record(point.clone())).unwrap();
    drop(gate);
    assert_eq!(queue.wait_for_all(), Err(Error::ILLEGAL_ADDRESS));
    assert_eq!(queue.submit(LEGACY, tell(&sender, 2)), Err(Error::ILLEGAL_ADDRESS));
    assert_eq!(queue.is_idle(LEGACY), Err(Error::ILLEGAL_ADDRESS));
    drop(sender);
    assert_eq!(receiver.recv(), Err(mpsc::RecvError), "work behind the error ran");
    queue.shut();
}

#[test]
fn blocking_work_of_one_stream_leaves_the_others_running() {
    let queue = start(None);
    let (sender, receiver) = mpsc::channel();
    let (collective, compute) = (queue.open(StreamKind::NonBlocking), queue.open(StreamKind::NonBlocking));
    let (release, released) = mpsc::channel::<()>();
    let work = move || {
        let _ = released.recv();
        Ok(())
    };
    queue.submit(collective, Entry::Blocking(Box::new(work))).unwrap();
    queue.submit(collective, tell(&sender, 2)).unwrap();
    queue.submit(compute, tell(&sender, 1)).unwrap();
    queue.wait_for_line(compute).unwrap();
    assert_eq!(queue.is_idle(collective), Ok(false));
    drop(release);
    queue.wait_for_all().unwrap();
    assert_eq!(receiver.try_iter().collect::<Vec<_>>(), [1, 2]);
    queue.shut();
}

#[test]
fn a_hung_device_finishes_nothing() {
    let queue = start(None);
    let line = queue.open(StreamKind::NonBlocking);
    queue.submit(LEGACY, Entry::Hang).unwrap();
    let (sender, receiver) = mpsc::channel();
    queue.submit(line, tell(&sender, 1)).unwrap();
    assert_eq!(queue.is_idle(LEGACY), Ok(false));
    queue.shut();
    drop(sender);
    assert_eq!(receiver.recv(), Err(mpsc::RecvError));
}

#[test]
fn seeded_work_is_late_while_no_host_waits() {
    let queue = Queue::start(Some(Order { seed: 1, patience: Duration::from_secs(3600) }));
    let (late, point) = (queue.open(StreamKind::NonBlocking), Arc::new(Point::default()));
    queue.submit(late, Entry::Record(point.clone())).unwrap();
    assert_eq!(queue.is_idle(late), Ok(false));
    assert!(!point.is_past());
    queue.wait_for_line(late).unwrap();
    assert!(point.is_past());
    queue.shut();
}
