use tokio_stream::StreamExt;

use super::*;

fn token(index: u32) -> pb::SampledToken {
    pb::SampledToken { token_id: 100 + index, index, logprob: None }
}

fn finished(generated: u32) -> pb::Finished {
    pb::Finished { generated, ..Default::default() }
}

#[tokio::test]
async fn what_waited_comes_as_one_event_with_the_ending() {
    let (sender, mut receiver) = channel();
    sender.push(vec![token(0)], None);
    sender.push(vec![token(1), token(2)], None);
    sender.end(Ending::Finished(finished(3)));
    let event = receiver.next().await.unwrap().unwrap();
    assert_eq!(event.tokens.iter().map(|t| t.index).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(event.finished, Some(finished(3)));
    assert!(receiver.is_finished());
    assert!(receiver.next().await.is_none());
}

#[tokio::test]
async fn a_failure_comes_after_the_tokens() {
    let (sender, mut receiver) = channel();
    sender.push(vec![token(0)], None);
    sender.end(Ending::Failed(Error::unavailable("worker 0 died")));
    assert_eq!(receiver.next().await.unwrap().unwrap().tokens.len(), 1);
    assert!(!receiver.is_finished());
    assert_eq!(receiver.next().await.unwrap().unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(receiver.is_finished());
}

#[tokio::test]
async fn a_waiting_reader_is_woken() {
    let (sender, mut receiver) = channel();
    let reader = tokio::spawn(async move { receiver.next().await });
    tokio::task::yield_now().await;
    sender.push(vec![token(0)], None);
    assert_eq!(reader.await.unwrap().unwrap().unwrap().tokens, [token(0)]);
    drop(sender);
}

#[tokio::test]
async fn a_dropped_sender_is_an_internal_failure() {
    let (sender, mut receiver) = channel();
    drop(sender);
    assert_eq!(receiver.next().await.unwrap().unwrap_err().kind(), ErrorKind::Internal);
}

#[tokio::test]
async fn a_long_prompts_logprobs_come_in_several_events_before_the_first_token() {
    let (sender, mut receiver) = channel();
    let piece = |first| pb::PromptLogprobs { first, tokens: vec![pb::TokenLogprob::default(); 10_000] };
    sender.push(vec![], Some(piece(1)));
    sender.push(vec![token(0)], Some(piece(10_001)));
    sender.end(Ending::Finished(finished(1)));
    let first = receiver.next().await.unwrap().unwrap();
    assert_eq!((first.prompt_logprobs.len(), first.tokens.len(), first.finished), (1, 0, None));
    let second = receiver.next().await.unwrap().unwrap();
    assert_eq!((second.prompt_logprobs.len(), second.tokens.len()), (1, 1));
    assert_eq!(second.finished, Some(finished(1)));
}
