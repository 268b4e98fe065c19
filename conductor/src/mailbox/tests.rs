use tokio_stream::StreamExt;
use tutti_runtime::output_room::OutputRoomMetrics;

use super::*;

fn token(index: u32) -> pb::SampledToken {
    pb::SampledToken { token_id: 100 + index, index, logprob: None }
}

fn finished(generated: u32) -> pb::Finished {
    pb::Finished { generated, ..Default::default() }
}

#[tokio::test]
async fn what_waited_comes_as_one_event_with_the_ending() {
    let (sender, mut receiver) = channel(&OutputRoom::default());
    sender.push(vec![token(0)], None).unwrap();
    sender.push(vec![token(1), token(2)], None).unwrap();
    sender.end(Ending::Finished(finished(3)));
    let event = receiver.next().await.unwrap().unwrap();
    assert_eq!(event.tokens.iter().map(|t| t.index).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(event.finished, Some(finished(3)));
    assert!(receiver.is_finished());
    assert!(receiver.next().await.is_none());
}

#[tokio::test]
async fn a_failure_comes_after_the_tokens() {
    let (sender, mut receiver) = channel(&OutputRoom::default());
    sender.push(vec![token(0)], None).unwrap();
    sender.end(Ending::Failed(Error::unavailable("worker 0 died")));
    assert_eq!(receiver.next().await.unwrap().unwrap().tokens.len(), 1);
    assert!(!receiver.is_finished());
    assert_eq!(receiver.next().await.unwrap().unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(receiver.is_finished());
}

#[tokio::test]
async fn a_waiting_reader_is_woken() {
    let (sender, mut receiver) = channel(&OutputRoom::default());
    let reader = tokio::spawn(async move { receiver.next().await });
    tokio::task::yield_now().await;
    sender.push(vec![token(0)], None).unwrap();
    assert_eq!(reader.await.unwrap().unwrap().unwrap().tokens, [token(0)]);
    drop(sender);
}

#[tokio::test]
async fn a_dropped_sender_is_an_internal_failure() {
    let (sender, mut receiver) = channel(&OutputRoom::default());
    drop(sender);
    assert_eq!(receiver.next().await.unwrap().unwrap_err().kind(), ErrorKind::Internal);
}

#[tokio::test]
async fn a_long_prompts_logprobs_come_in_several_events_before_the_first_token() {
    let (sender, mut receiver) = channel(&OutputRoom::default());
    let piece = |first| pb::PromptLogprobs { first, tokens: vec![pb::TokenLogprob::default(); 10_000] };
    sender.push(vec![], Some(piece(1))).unwrap();
    sender.push(vec![token(0)], Some(piece(10_001))).unwrap();
    sender.end(Ending::Finished(finished(1)));
    let first = receiver.next().await.unwrap().unwrap();
    assert_eq!((first.prompt_logprobs.len(), first.tokens.len(), first.finished), (1, 0, None));
    let second = receiver.next().await.unwrap().unwrap();
    assert_eq!((second.prompt_logprobs.len(), second.tokens.len()), (1, 1));
    assert_eq!(second.finished, Some(finished(1)));
}

#[tokio::test]
async fn the_reader_that_leaves_most_unread_loses_its_output_when_the_room_is_full() {
    let scored = |index| pb::SampledToken {
        logprob: Some(pb::TokenLogprob { top: vec![pb::TopLogprob::default(); 20], ..Default::default() }),
        ..token(index)
    };
    // The output of one stalled reader fits beside the good reader's token, so the last of them is never the largest
    // that must end. The output of two does not fit.
    let most = token_bytes(&[scored(0)]) * 12;
    let room = OutputRoom::new(most, OutputRoomMetrics::default());
    let (good, mut reader) = channel(&room);
    let stalled: Vec<_> = (0..4).map(|_| channel(&room)).collect();
    let mut ended = 0;
    for index in 0..40 {
        // A reader that takes each token is never the one that ends, however many others leave theirs.
        good.push(vec![scored(index)], None).unwrap();
        assert_eq!(reader.next().await.unwrap().unwrap().tokens, [scored(index)]);
        let (sender, _) = &stalled[index as usize % 4];
        ended += usize::from(sender.push(vec![scored(index / 4)], None).is_err());
    }
    assert!(ended > 0, "nothing ended");
    good.end(Ending::Finished(finished(40)));
    assert_eq!(reader.next().await.unwrap().unwrap().finished, Some(finished(40)));
    let mut failed = 0;
    for (sender, mut receiver) in stalled {
        sender.end(Ending::Finished(finished(10)));
        match receiver.next().await.unwrap() {
            // The last output is whole, or its end says that it is not.
            Ok(event) => assert_eq!((event.tokens.len(), event.finished), (10, Some(finished(10)))),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::TooSlow);
                failed += 1;
            }
        }
        assert!(receiver.is_finished() && receiver.next().await.is_none());
    }
    assert!(failed > 0 && failed < 4, "{failed} requests ended");
}
