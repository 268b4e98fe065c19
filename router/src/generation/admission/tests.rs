use tutti_runtime::ErrorKind;

use super::*;

const NOBODY: Share = Share::WITHOUT_KEY;

fn cost(choices: u64, tokens: u64) -> QueueCost {
    QueueCost { choices, tokens }
}

fn admission(choices: u32, tokens: usize) -> (Arc<Admission>, Metrics) {
    let settings = RouterSettings {
        max_queued_choices: Some(choices),
        max_queued_tokens: tokens,
        ..RouterSettings::default()
    };
    let metrics = Metrics::default();
    (Admission::new(settings, &metrics), metrics)
}

#[test]
fn each_class_is_bounded_in_choices_and_in_tokens() {
    let (admission, metrics) = admission(16, 100);
    let small = |priority| (0..8).map(move |_| (priority, NOBODY, cost(2, 12)));
    let enter = |(priority, share, cost)| admission.enter(priority, share, cost);
    let first: Vec<_> = small(0).map(|request| enter(request).unwrap()).collect();
    assert_eq!(admission.enter(0, NOBODY, cost(1, 0)).err().unwrap().kind(), ErrorKind::Overloaded);
    // Other classes have room of their own.
    let urgent: Vec<_> = small(-1).map(|request| enter(request).unwrap()).collect();
    let low = admission.enter(8, NOBODY, cost(1, 1)).unwrap();
    assert!(admission.enter(-8, NOBODY, cost(1, 1)).is_err());
    assert!(metrics.encode().contains(r#"tutti_router_queued_tokens{class="normal"} 96"#));
    drop(first);
    let tokens: Vec<_> = (0..8).map(|_| admission.enter(0, NOBODY, cost(1, 12)).unwrap()).collect();
    assert_eq!(admission.enter(0, NOBODY, cost(1, 5)).err().unwrap().kind(), ErrorKind::Overloaded);
    drop((tokens, urgent, low));
    for class in CLASSES {
        for name in ["choices", "tokens"] {
            let line = format!("tutti_router_queued_{name}{{class=\"{class}\"}} 0");
            assert!(metrics.encode().contains(&line), "{line}");
        }
    }
}

#[test]
fn an_oversized_request_locks_nobody_out_of_its_class() {
    let (admission, metrics) = admission(16, 100);
    let oversized = admission.enter(0, NOBODY, cost(128, 1_000_000)).unwrap();
    assert!(metrics.encode().contains(r#"tutti_router_queued_tokens{class="normal"} 1000000"#));
    assert!(admission.enter(0, NOBODY, cost(128, 1_000_000)).is_err(), "only one of them at a time");
    let others: Vec<_> = (0..4).map(|_| admission.enter(0, NOBODY, cost(1, 6)).unwrap()).collect();
    assert!(admission.enter(0, NOBODY, cost(1, 6)).is_err());
    drop(oversized);
    drop(others);
    assert_eq!(admission.queues[1].lock().choices.held(), 0);
}

#[test]
fn a_flood_of_one_key_leaves_room_for_another() {
    let (admission, _) = admission(16, 10_000);
    let flood = Share::of_key("flood");
    let flood: Vec<_> = std::iter::from_fn(|| admission.enter(0, flood, cost(1, 1)).ok()).collect();
    assert_eq!(flood.len(), 12);
    admission.enter(0, Share::of_key("one"), cost(1, 1)).unwrap();
}

#[test]
fn an_estimate_is_replaced_by_the_exact_number() {
    let (admission, _) = admission(10, 100);
    let mut queued = admission.enter(0, NOBODY, cost(1, 90)).unwrap();
    assert!(admission.enter(0, NOBODY, cost(1, 50)).is_err());
    queued.recount(40);
    let mut other = admission.enter(0, NOBODY, cost(1, 30)).unwrap();
    other.recount(500);
    drop((queued, other));
    assert_eq!(admission.queues[1].lock().tokens.held(), 0);
}

#[test]
fn clients_are_told_to_wait_as_long_as_the_last_requests_waited() {
    let (admission, _) = admission(1, 10);
    let _held = admission.enter(0, NOBODY, cost(1, 1)).unwrap();
    let after = || admission.enter(0, NOBODY, cost(1, 1)).err().unwrap().retry_after();
    assert_eq!(after(), Some(Duration::from_secs(1)));
    admission.queues[1].lock().waited = 6.5;
    assert_eq!(after(), Some(Duration::from_secs(7)));
    admission.queues[1].lock().waited = 1e6;
    assert_eq!(after(), Some(Duration::from_secs(60)));
}
