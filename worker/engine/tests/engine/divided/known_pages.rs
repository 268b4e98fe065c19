//! Tests of transfers of requests whose first pages are in the decoding side's prefix cache.

use tutti_transfer::{Event, Extent, Run, UnitKind};

use super::{Answers, PAGE_BYTES, Side, arrived, carry, decode, key, prefill_behind};
use crate::common::{expected, launch, settings};

#[test]
fn only_known_pages_are_neither_sent_nor_written() {
    let (mut from, mut to, answers) = (Side::new(&settings()), Side::new(&settings()), Answers::default());
    // 18 tokens take five pages. The last page is always sent.
    let before = launch(1, 18, 9);
    to.engine.launch(before.clone());
    to.idle();
    let again = |request: u64| {
        let mut whole = launch(request, 18, 9);
        whole.spec.as_mut().unwrap().prompt = before.spec.as_ref().unwrap().prompt.clone();
        whole
    };
    for (request, known_by_the_sender, missing) in
        [(2, 4, None), (3, 5, None), (4, 0, Some("page 4 of 5 is missing"))]
    {
        let whole = again(request);
        to.engine.launch(decode(&whole));
        to.idle();
        assert_eq!(to.connector.lock().reserved.drain(..).collect::<Vec<_>>(), [(key(request, 1), 5, 4)]);
        from.engine.launch(prefill_behind(&whole, known_by_the_sender));
        from.idle();
        from.give(Event::Accepted(key(request, 0)));
        let first = from.connector.lock().sent.front().map(|(run, _)| run.first);
        assert_eq!(first, Some(known_by_the_sender.min(4)));
        // Shared pages are never written, whatever the sender claims. A run that begins in a shared page is dropped as
        // a whole.
        let (there, kind, extent) = (key(request, 1), UnitKind::Pages, Extent::Whole);
        to.give(arrived((Run { key: there, kind, extent, first: 3, count: 1 }, vec![9; PAGE_BYTES])));
        carry(&from, &to, &answers);
        to.idle();
        let answer = answers.lock().unwrap().pop().unwrap();
        match missing {
            None => {
                assert_eq!((answer, to.ids(request)), (Ok(()), expected(&whole).output[1..].to_vec()));
            }
            Some(missing) => {
                assert!(answer.unwrap_err().message().contains(missing));
                to.engine.cancel(key(request, 1));
                to.idle();
            }
        }
        assert_eq!(to.load.kv_pages_used, 0);
    }
    // This decoding side has no page cached, so it lacks the page that the sender did not send.
    let (whole, mut other) = (again(6), Side::new(&settings()));
    other.engine.launch(decode(&whole));
    other.idle();
    from.engine.launch(prefill_behind(&whole, 1));
    from.idle();
    carry(&from, &other, &answers);
    other.idle();
    let answer = answers.lock().unwrap().pop().unwrap();
    assert!(answer.unwrap_err().message().contains("page 0 of 5 is missing"));
    assert!(other.ids(6).is_empty());
    // A request that reads the cached pages still finds their original content.
    let longer = {
        let mut whole = launch(5, 21, 4);
        whole.spec.as_mut().unwrap().prompt[..18].clone_from_slice(&before.spec.as_ref().unwrap().prompt);
        whole
    };
    to.engine.launch(longer.clone());
    to.idle();
    assert_eq!(to.ids(5), expected(&longer).output);
}

#[test]
fn imported_pages_are_known_to_later_requests() {
    let (mut from, mut to, answers) = (Side::new(&settings()), Side::new(&settings()), Answers::default());
    for (request, known) in [(1, 0), (2, 4)] {
        let mut whole = launch(request, 18, 9);
        whole.spec.as_mut().unwrap().prompt = launch(1, 18, 9).spec.unwrap().prompt;
        to.engine.launch(decode(&whole));
        to.idle();
        assert_eq!(to.connector.lock().reserved.pop(), Some((key(request, 1), 5, known)));
        from.engine.launch(prefill_behind(&whole, known));
        from.idle();
        from.give(Event::Accepted(key(request, 0)));
        carry(&from, &to, &answers);
        to.idle();
        assert_eq!(to.ids(request), expected(&whole).output[1..]);
    }
    assert!(answers.lock().unwrap().iter().all(Result::is_ok));
}
