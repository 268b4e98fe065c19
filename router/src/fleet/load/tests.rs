use super::*;

fn cluster(running: u32, waiting: u32, kv_pages_used: u32) -> pb::GetClusterResponse {
    let load = pb::WorkerLoad { running, waiting, kv_pages_used, ..Default::default() };
    let worker = |phase: pb::WorkerPhase| pb::WorkerStatus {
        phase: phase.into(),
        load: Some(load),
        ..Default::default()
    };
    let workers = vec![worker(pb::WorkerPhase::Ready), worker(pb::WorkerPhase::Gone)];
    pb::GetClusterResponse { workers, ..Default::default() }
}

#[test]
fn a_request_is_counted_in_one_stage_at_a_time_and_leaves_nothing() {
    let own = Arc::new(OwnLoad::default());
    let load = || Reported::default().load(&own, 1);
    let mut booking = Booking::new(own.clone(), 5);
    let queued = Load { requests: 1, queued_blocks: 5, ..Load::default() };
    assert_eq!(load(), queued);
    booking.decodes(8);
    booking.decodes(9);
    assert_eq!(load(), Load { requests: 1, active_blocks: 9, ..Load::default() });
    let second = Booking::new(own.clone(), 5);
    drop(booking);
    assert_eq!(load(), queued);
    drop(second);
    assert_eq!(load(), Load::default());
    assert_eq!(own.waiting.load(Relaxed), 0);
}

#[test]
fn reported_load_beyond_our_own_belongs_to_other_routers() {
    let own = Arc::new(OwnLoad::default());
    let mut ours = Booking::new(own.clone(), 5);
    ours.decodes(6);
    let _waits = Booking::new(own.clone(), 2);
    let reported = Reported::of(&cluster(3, 4, 20), &own);
    assert_eq!((reported.workers, reported.running, reported.kv_pages_used), (1, 3, 20));
    // Our share is 8 of the 20 pages and 1 of the 4 waiting requests. The other 3 are assumed to have 10 blocks,
    // like the prompt to be placed.
    let expected = Load { requests: 2, active_blocks: 6 + 12, queued_blocks: 2 + 30, workers: 1 };
    assert_eq!(reported.load(&own, 10), expected);
    assert_eq!(Reported::of(&cluster(0, 0, 0), &own).load(&own, 10).active_blocks, 6);
}

#[test]
fn queues_of_several_conductors_are_one_queue_with_the_oldest_request_of_all() {
    let queue = |oldest_waiting_ms, waiting| {
        let load = pb::WorkerLoad { waiting, oldest_waiting_ms, ..Default::default() };
        let worker = |load| pb::WorkerStatus {
            phase: pb::WorkerPhase::Ready.into(),
            load: Some(load),
            ..Default::default()
        };
        let workers = vec![worker(load), worker(pb::WorkerLoad::default())];
        let cluster = pb::GetClusterResponse { workers, ..Default::default() };
        Reported::of(&cluster, &OwnLoad::default()).queue()
    };
    assert_eq!(queue(70, 2).and(queue(30, 5)), Queue { waiting: 7, oldest_waiting_ms: 70 });
}
