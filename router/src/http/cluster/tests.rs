use super::*;

#[test]
fn the_time_of_a_request_in_progress_runs() {
    let at = |at_us, transition| pb::RequestTransition { at_us, transition: Some(transition) };
    let mut life = vec![
        at(1_000, Transition::Accepted(pb::Accepted {})),
        at(6_000, Transition::FirstToken(pb::FirstToken {})),
    ];
    let shown = |transitions: &[pb::RequestTransition]| {
        let found = pb::RecentRequest { transitions: transitions.to_vec(), ..Default::default() };
        request(found, 3_001_000, &Caller::default()).took_us
    };
    assert_eq!(shown(&life), 3_000_000);
    life.push(at(
        8_000,
        Transition::Ended(pb::RequestEnded { outcome: "finished".into(), ..Default::default() }),
    ));
    assert_eq!(shown(&life), 7_000);
    assert_eq!(shown(&[]), 0);
}
