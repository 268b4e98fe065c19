use tutti_runtime::ErrorKind;

use super::*;

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
    let (admission, metrics) = admission(4, 100);
    let first = admission.enter(0, 2, 10).unwrap();
    assert_eq!(admission.enter(0, 3, 10).err().unwrap().kind(), ErrorKind::Overloaded);
    assert_eq!(admission.enter(0, 1, 91).err().unwrap().kind(), ErrorKind::Overloaded);
    let second = admission.enter(0, 2, 90).unwrap();
    assert!(admission.enter(0, 1, 0).is_err());
    // Other classes have room of their own.
    let (urgent, low) = (admission.enter(-1, 4, 100).unwrap(), admission.enter(8, 4, 100).unwrap());
    assert!(admission.enter(-8, 1, 1).is_err() && admission.enter(1, 1, 1).is_err());
    assert!(metrics.encode().contains(r#"tutti_router_queued_tokens{class="normal"} 100"#));
    drop((first, second, urgent, low));
    for class in CLASSES {
        for name in ["choices", "tokens"] {
            let line = format!("tutti_router_queued_{name}{{class=\"{class}\"}} 0");
            assert!(metrics.encode().contains(&line), "{line}");
        }
    }
}

#[test]
fn a_large_request_is_admitted_alone() {
    let (admission, _) = admission(1, 10);
    let large = admission.enter(0, 5, 1000).unwrap();
    assert!(admission.enter(0, 1, 1).is_err());
    drop(large);
    admission.enter(0, 1, 1).unwrap();
}

#[test]
fn an_estimate_is_replaced_by_the_exact_number() {
    let (admission, _) = admission(10, 100);
    let mut queued = admission.enter(0, 1, 90).unwrap();
    assert!(admission.enter(0, 1, 50).is_err());
    queued.recount(40);
    let mut other = admission.enter(0, 1, 50).unwrap();
    other.recount(500);
    drop((queued, other));
    assert_eq!(admission.queues[1].lock().tokens, 0);
}

#[test]
fn clients_are_told_to_wait_as_long_as_the_last_requests_waited() {
    let (admission, _) = admission(1, 10);
    let _held = admission.enter(0, 1, 1).unwrap();
    let after = || admission.enter(0, 1, 1).err().unwrap().retry_after();
    assert_eq!(after(), Some(Duration::from_secs(1)));
    admission.queues[1].lock().waited = 6.5;
    assert_eq!(after(), Some(Duration::from_secs(7)));
    admission.queues[1].lock().waited = 1e6;
    assert_eq!(after(), Some(Duration::from_secs(60)));
}
