use super::*;

fn at(at_us: u64, transition: Transition) -> pb::RequestTransition {
    pb::RequestTransition { at_us, transition: Some(transition) }
}

fn launched(role: &str, worker: u32) -> Transition {
    Transition::Launched(pb::Launched { role: role.into(), worker })
}

#[test]
fn a_life_is_cut_where_the_request_moves() {
    let chunk = Transition::PrefillChunk(pb::PrefillChunk { worker: 0, tokens: 256, took_us: 3_000 });
    let life = [
        at(1_000, Transition::Accepted(pb::Accepted {})),
        at(2_000, launched("prefill", 0)),
        at(6_000, chunk),
        at(6_500, Transition::FirstToken(pb::FirstToken {})),
        at(6_700, Transition::HandedOver(pb::PrefillHandedOver {})),
        at(9_000, Transition::Ended(pb::RequestEnded { outcome: "finished".into(), ..Default::default() })),
    ];
    let phases = phases(&life, 20_000);
    let found: Vec<_> = phases.iter().map(|it| (it.name.trim(), it.from, it.to, it.goes_on)).collect();
    assert_eq!(
        found,
        [
            ("queue", 0, 1_000, false),
            ("queue and prefill, worker 0", 1_000, 5_500, false),
            ("chunk of 256 tokens, worker 0", 2_000, 5_000, false),
            ("decode", 5_500, 8_000, false),
            ("transfer done", 5_700, 5_700, false),
        ]
    );
}

#[test]
fn a_request_in_progress_has_a_phase_that_goes_on() {
    let life = [at(5, Transition::Accepted(pb::Accepted {})), at(9, launched("whole", 1))];
    let last = phases(&life, 1_009).pop().expect("phases");
    assert!(last.goes_on && last.name.ends_with("worker 1"), "{last:?}");
    assert_eq!((last.from, last.to), (4, 1_004), "the phase lasts until now");
    assert!(phases(&[], 9).is_empty());
}

#[test]
fn the_time_of_a_request_runs_until_its_end() {
    let mut request = pb::RecentRequest {
        transitions: vec![
            at(1_000, Transition::Accepted(pb::Accepted {})),
            at(6_000, Transition::FirstToken(pb::FirstToken {})),
        ],
        request_id: "client-1".into(),
        ..Default::default()
    };
    assert_eq!(lifetime(&request, 3_001_000), 3_000_000);
    // A conductor's clock that was set back does not make the time negative.
    assert_eq!(lifetime(&request, 5), 5_000);
    let text = waterfall(&request, 3_001_000);
    assert!(text.contains("in progress, 0 prompt tokens, 0 output tokens, 3.00 s, id client-1"), "{text}");
    assert!(text.contains("3.00 s+"), "{text}");
    request.transitions.push(at(
        8_000,
        Transition::Ended(pb::RequestEnded { outcome: "finished".into(), ..Default::default() }),
    ));
    assert_eq!(lifetime(&request, 3_001_000), 7_000);
    assert_eq!(lifetime(&pb::RecentRequest::default(), 9), 0);
}

#[test]
fn bars_stay_within_their_width_and_are_never_empty() {
    for (from, to, whole) in
        [(0, 0, 0), (0, 10, 10), (10, 10, 10), (3, 4, 1_000_000), (999_999, 1_000_000, 1_000_000)]
    {
        let bar = bar(from, to, whole);
        assert_eq!(bar.len() as u64, BAR + 2, "{bar}");
        assert!(bar.contains('#'), "{bar}");
    }
    assert_eq!(bar(0, 5, 10), format!("|{}{}|", "#".repeat(20), " ".repeat(20)));
}
