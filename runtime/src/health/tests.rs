use super::*;

#[test]
fn a_process_is_live_while_each_of_its_tasks_makes_progress() {
    let health = Health::default();
    assert_eq!(health.live(), State::Ok);
    let quick = health.pulse("the quick task", Duration::from_secs(10));
    let slow = health.of_same_process().pulse("the slow task", Duration::from_secs(60));
    let begin = Instant::now();
    let after = |seconds| begin + Duration::from_secs(seconds);
    assert_eq!(health.live_at(after(9)), State::Ok);
    assert_eq!(health.live_at(after(12)), State::Not("the quick task has made no progress for 12 s".into()));
    // A beat extends the time limit of its own task only.
    *quick.0.last.lock() = after(57);
    assert_eq!(health.live_at(after(58)), State::Ok);
    let late = State::Not("the slow task has made no progress for 62 s".into());
    assert_eq!(health.live_at(after(62)), late);
    slow.beat();
    quick.beat();
    assert_eq!(health.live(), State::Ok);
    // A task that has ended does not beat any more.
    drop((quick, slow));
    assert!(matches!(health.live_at(after(100)), State::Not(_)));
}

#[test]
fn a_draining_process_is_not_ready_whatever_its_tasks_find() {
    let health = Health::default();
    health.set_ready(State::Ok);
    let other = health.clone();
    health.drain();
    other.set_ready(State::Ok);
    assert_eq!(health.ready(), State::Not("draining".into()));
}
