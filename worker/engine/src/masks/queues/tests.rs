use tutti_constraints::{Constraint, Kind};
use tutti_proto::cluster::v1 as pb;

use super::{super::Guided, *};

fn job(request: u64) -> Job {
    let guide = Guide::of(Guided {
        key: pb::GraphKey { request, ..Default::default() }.into(),
        constraint: Some(Constraint::new(Kind::Regex("a".to_owned()))),
        thinking: None,
        generated: &[],
        stop_tokens: &[],
        vocabulary: 257,
    });
    Job::new(guide.unwrap(), Work::Advance(0))
}

fn request(job: Result<Job, Option<Duration>>) -> Result<u64, Option<Duration>> {
    job.map(|job| job.guide.key().request.0)
}

#[test]
fn no_kind_of_job_waits_for_ever() {
    let jobs = |first: u64| (first..first + 8).map(job).collect();
    let mut queues =
        Queues { quick: jobs(0), known: jobs(100), slow: jobs(200), replays: jobs(300), ..Queues::default() };
    let mut take = || request(queues.take(Takes::All, Instant::now())).unwrap();
    let taken: Vec<u64> = (0..8).map(|_| take()).collect();
    assert_eq!(taken, [0, 100, 1, 200, 2, 300, 3, 101]);
    queues.quick.clear();
    let taken: Vec<u64> = (0..6).map(|_| request(queues.take(Takes::All, Instant::now())).unwrap()).collect();
    assert_eq!(taken, [102, 201, 103, 301, 104, 105]);
}

#[test]
fn a_first_mask_does_not_wait_for_the_parts_of_a_replay() {
    let mut queues = Queues::default();
    let replay = || Work::Replay(Replay { tokens: vec![1], done: 0 });
    (0..9).for_each(|request| queues.push(Job { work: replay(), ..job(request) }, |_| true));
    queues.push(Job { work: Work::Open(Vec::new()), ..job(100) }, |_| false);
    queues.push(Job { work: Work::Open(vec![1]), ..job(200) }, |_| true);
    let mut taken = (0..4).map(|_| request(queues.take(Takes::All, Instant::now())).unwrap());
    assert!(taken.any(|request| request == 100));
}

#[test]
fn a_quick_job_does_not_wait_for_one_that_turned_out_slow() {
    let mut queues = Queues { quick: (0..3).map(job).collect(), ..Queues::default() };
    let queued = queues.quick[0].queued;
    assert_eq!(request(queues.take(Takes::Overdue, queued)), Err(Some(SLOW)));
    assert_eq!(request(queues.take(Takes::Overdue, queued + SLOW / 2)), Err(Some(SLOW / 2)));
    assert_eq!(request(queues.take(Takes::Overdue, queued + SLOW)), Ok(0));
    assert_eq!(request(queues.take(Takes::Quick, queued)), Ok(1));
    assert_eq!(queues.remove(job(2).guide.key()).unwrap().guide.key().request.0, 2);
    assert_eq!(request(queues.take(Takes::Overdue, queued + SLOW)), Err(None));
}
