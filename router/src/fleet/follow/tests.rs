use tutti_runtime::metrics::Metrics;

use super::*;
use crate::fleet::{Conductors, FleetSettings};

#[tokio::test]
async fn found_conductors_join_the_fleet_and_an_empty_lookup_changes_nothing() {
    let metrics = Metrics::default();
    let conductors = Conductors { discover: Some("conductors:1".into()), ..Conductors::default() };
    let fleet = Fleet::new(conductors, FleetSettings::default(), true, None, &metrics);
    let names = |text: &str| text.split_whitespace().map(str::to_owned).collect::<BTreeSet<_>>();
    let why = || match fleet.readiness() {
        (State::Not(why), _) => why,
        (State::Ok, _) => panic!("ready, and no conductor was asked"),
    };
    assert_eq!(why(), "no conductor is known yet");
    assert_eq!(fleet.take_found("conductors:1", names("http://a:1 http://b:1")), None);
    assert_eq!(
        why(),
        "http://a:1: no answer from the conductor yet; http://b:1: no answer from the conductor yet"
    );
    let b = fleet.roster.read().members()[1].clone();
    fleet.note_error(&b, &Error::unavailable("connection refused"));
    assert!(metrics.encode().contains("conductor_up{conductor=\"http://b:1\"} 0"));
    fleet.note_lookup(fleet.take_found("conductors:1", BTreeSet::new()));
    assert!(why().contains("b:1: connection refused") && why().ends_with("conductors:1 has no address"));
    fleet.note_lookup(fleet.take_found("conductors:1", names("http://a:1")));
    assert_eq!(why(), "http://a:1: no answer from the conductor yet");
    assert!(b.is_removed() && !metrics.encode().contains("http://b:1"));
}
