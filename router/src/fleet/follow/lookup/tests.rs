use tutti_runtime::{Error, health::State, metrics::Metrics};

use super::*;
use crate::{
    fleet::{Access, Conductors, FleetSettings},
    served::TextSettings,
};

fn without_text() -> TextSettings {
    TextSettings { skip_tokenizer_init: true, ..TextSettings::default() }
}

#[tokio::test]
async fn found_conductors_join_the_fleet_and_an_empty_lookup_changes_nothing() {
    let metrics = Metrics::default();
    let discover = Some("conductors:1".into());
    let conductors = Conductors { discover, access: Access::insecure(), ..Conductors::default() };
    let fleet = Fleet::new(conductors, FleetSettings::default(), without_text(), None, &metrics);
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

#[tokio::test]
async fn an_address_found_that_may_not_be_used_is_named() {
    let conductors = Conductors { discover: Some("localhost:1".into()), ..Conductors::default() };
    let fleet = Fleet::new(conductors, FleetSettings::default(), without_text(), None, &Metrics::default());
    let found = BTreeSet::from(["http://10.0.0.1:1".to_owned()]);
    let problem = fleet.take_found("localhost:1", found).unwrap();
    assert!(problem.contains("10.0.0.1:1") && problem.contains("--insecure-plaintext"), "{problem}");
}
