use tutti_proto::cluster::v1 as pb;

use super::*;

fn ready(mask: &TokenMask) -> Guide {
    let thinking = pb::Thinking { begin: None, end: 7, max_tokens: Some(0) };
    let guide = Guide::of(Guided {
        key: pb::GraphKey::default().into(),
        constraint: None,
        thinking: Some(&thinking),
        generated: &[],
        stop_tokens: &[],
        vocabulary: 64,
    });
    let guide = guide.unwrap();
    let next = NextMask { mask: Some(mask.clone()), hash: u64::from(mask.words()[0] % 3), only_ends: false };
    guide.finish_work(None, Next::Ready(next), Duration::ZERO);
    guide
}

#[test]
fn rows_with_equal_masks_share_the_words_and_others_do_not() {
    let mut masks = StepMasks::begin(GRACE);
    let mut of = |words: [u32; 2]| {
        let next = masks.of(&ready(&TokenMask::new(words)), 0, Rerun::Possible).unwrap();
        assert_eq!(next.mask.as_ref().unwrap().words(), words);
        next.mask.unwrap()
    };
    let (first, second) = (of([1, 2]), of([1, 2]));
    assert!(first.shares_words(&second));
    // Two masks with one hash.
    assert!(!first.shares_words(&of([4, 2])));
    assert!(!first.shares_words(&of([2, 2])));
}

#[test]
fn a_pending_mask_makes_its_row_late() {
    let guide = Guide::of(Guided {
        key: pb::GraphKey::default().into(),
        constraint: Some(tutti_constraints::Constraint::new(tutti_constraints::Kind::JsonObject)),
        thinking: None,
        generated: &[],
        stop_tokens: &[],
        vocabulary: 64,
    });
    let late = StepMasks::begin(GRACE).of(&guide.unwrap(), 0, Rerun::Possible);
    assert_eq!(late, Err(NotSampled::Late));
}

/// A row in flight may sample with a mask before the engine hears that it is ready. The next mask is awaited then.
#[test]
fn a_mask_that_was_used_before_its_event_makes_the_next_one_awaited() {
    let guide = Guide::of(Guided {
        key: pb::GraphKey::default().into(),
        constraint: Some(tutti_constraints::Constraint::new(tutti_constraints::Kind::JsonObject)),
        thinking: None,
        generated: &[],
        stop_tokens: &[],
        vocabulary: 64,
    });
    let guide = guide.unwrap();
    assert!(guide.await_next());
    assert!(guide.finish_work(None, Next::Ready(NextMask::ALL), Duration::ZERO), "an event");
    assert!(guide.begin_advance(7));
    assert!(matches!(guide.next_or_await(), Next::Pending));
    assert!(guide.finish_work(None, Next::Ready(NextMask::ALL), Duration::ZERO), "an event of the next mask");
}
