use super::*;

#[test]
fn a_crash_loop_is_told_with_its_last_sign_until_a_process_stays_up() {
    let mut record = RankRecord::default();
    for exits in 1..=3 {
        assert!(!record.is_crash_looping());
        record.observe_trouble("signal 9".into());
        record.ended(exits);
    }
    record.joined();
    record.ready();
    let detail = record.detail().unwrap();
    assert!(detail.contains("crash loop, 3 processes") && detail.contains("signal 9"), "{detail}");
    assert!(!record.is_hopeless(), "it was ready in between");
    record.well();
    assert_eq!(record.detail(), None);
}

#[test]
fn one_that_never_gets_ready_is_hopeless() {
    let mut record = RankRecord::default();
    (1..=3).for_each(|exits| record.ended(exits));
    assert!(record.is_hopeless());
}

#[test]
fn a_process_that_is_killed_while_it_loads_is_named_and_not_started_for_ever() {
    let mut record = RankRecord::default();
    for _ in 1..=2 {
        record.joined();
        assert!(record.killed());
    }
    let detail = record.detail().unwrap();
    assert!(detail.contains("killed while loading") && detail.contains("likely for memory"), "{detail}");
    record.joined();
    record.ready();
    assert!(!record.killed(), "it had loaded the model");
    record.joined();
    record.ended_unkilled();
    assert!(
        !record.killed(),
        "the process that loaded the model was not killed, and the next one had not joined"
    );
    for _ in 1..=3 {
        assert!(!record.killed(), "it had not joined");
        record.joined();
        assert!(record.killed());
    }
    record.given_up = true;
    assert!(record.is_hopeless());
    assert!(record.detail().unwrap().starts_with("given up; killed while loading"));
}

#[test]
fn a_replica_is_given_up_after_three_kills_of_any_of_its_ranks() {
    let replica = crate::cluster::Topology::all_in_one(4, 2).replica_of(Rank(2)).unwrap();
    let mut ranks = Ranks::default();
    for rank in [2, 3, 0, 0, 0, 2] {
        assert!(!ranks.are_killed_by_loading(replica));
        ranks.entry(Rank(rank)).joined();
        assert!(ranks.entry(Rank(rank)).killed());
    }
    assert!(ranks.are_killed_by_loading(replica));
}
