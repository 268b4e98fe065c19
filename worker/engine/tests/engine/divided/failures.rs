//! Tests of transfers that fail before their request arrives, or after the request has continued.

use tutti_engine::TransferError;
use tutti_proto::cluster::v1::completion::Outcome;
use tutti_transfer::Event;

use super::{Answers, Side, carry, decode, key, prefill};
use crate::common::{expected, launch, settings};

fn lost(request: u64, graph: u32) -> Event {
    Event::Failed(key(request, graph), TransferError::Lost("the peer is gone".into()))
}

#[test]
fn a_failure_before_its_request_ends_that_request_alone() {
    let mut from = Side::new(&settings());
    from.give(lost(1, 0));
    from.step();
    assert!(from.outcomes.is_empty() && from.connector.lock().events.is_empty(), "the failure was taken");

    let (failed, other) = (launch(1, 30, 5), launch(2, 30, 5));
    from.engine.launch(prefill(&failed));
    from.engine.launch(prefill(&other));
    from.idle();
    assert!(
        matches!(&from.outcomes[&1], Outcome::HandoverFailed(fault) if fault.message.contains("the peer is gone"))
    );
    from.give(Event::Accepted(key(2, 0)));
    from.idle();
    assert!(matches!(from.outcomes[&2], Outcome::HandedOver(_)));
    assert_eq!(from.load.kv_pages_used, 0);
    assert!(from.engine.is_idle());

    // A failure fails one attempt only, because the next attempt of the same request has another key.
    let mut again = prefill(&failed);
    again.key = again.key.map(|key| tutti_proto::cluster::v1::GraphKey { incarnation: 1, ..key });
    from.outcomes.clear();
    from.engine.launch(again.clone());
    from.idle();
    from.give(Event::Accepted(again.key.expect("a launch has a key").into()));
    from.idle();
    assert!(matches!(from.outcomes[&1], Outcome::HandedOver(_)));
}

#[test]
fn a_failure_after_the_request_continued_ends_nothing() {
    let (mut from, mut to, answers) = (Side::new(&settings()), Side::new(&settings()), Answers::default());
    let whole = launch(1, 30, 9);
    to.engine.launch(decode(&whole));
    from.engine.launch(prefill(&whole));
    from.idle();
    to.step();
    carry(&from, &to, &answers);
    while answers.lock().expect("no thread panicked").is_empty() {
        assert!(to.step(), "the import was not answered");
    }
    to.give(lost(1, 1));
    to.idle();
    assert!(matches!(to.outcomes[&1], Outcome::Finished(_)));
    assert_eq!(to.ids(1), expected(&whole).output[1..]);
}
