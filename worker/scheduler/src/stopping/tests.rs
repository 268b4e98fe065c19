use super::*;

#[test]
fn an_end_is_forbidden_up_to_min_tokens_and_ends_after() {
    let stopping = Stopping::new(8, 2, &[7], &[9]);
    assert_eq!(*stopping.forbidden(1), [7, 9]);
    assert_eq!(stopping.finish(7, 1), None);
    assert!(stopping.forbidden(2).is_empty());
    assert_eq!(stopping.finish(7, 2), Some(Finish::EndOfSequence));
    assert_eq!(stopping.finish(9, 2), Some(Finish::StopToken(9)));
    assert_eq!(stopping.finish(1, 6), None);
    assert_eq!(stopping.finish(1, 7), Some(Finish::Length));
}

#[test]
fn a_stop_token_as_the_last_allowed_one_is_a_stop() {
    assert_eq!(Stopping::new(1, 0, &[7], &[]).finish(7, 0), Some(Finish::EndOfSequence));
}

#[test]
fn an_id_that_is_both_counts_as_end_of_sequence() {
    assert_eq!(Stopping::new(8, 0, &[7], &[7]).finish(7, 0), Some(Finish::EndOfSequence));
}
