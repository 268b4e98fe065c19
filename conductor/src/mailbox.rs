//! A request's way out: one mailbox, filled by worker reports, emptied by the client's stream.
//!
//! What arrives while nobody reads is kept together and handed out as one event, so a slow reader gets fewer and
//! larger events and never holds up a worker. It is bounded by the request itself: at most `max_tokens` tokens and one
//! logprob for each prompt token ever go in.
//!
//! [`Sender::end`] consumes the sender: a request has exactly one ending. A sender dropped without one ends its request
//! as an internal failure, so that no client waits for ever.

use std::{
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use parking_lot::Mutex;
use tokio_stream::Stream;
use tutti_proto::cluster::v1 as pb;
use tutti_runtime::{Error, ErrorKind};

/// The most prompt logprobs in one event: with 20 alternatives each it stays well under the largest gRPC message.
const MAX_PROMPT_LOGPROBS_PER_EVENT: usize = 16_384;

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Ending {
    /// It ran to its end.
    Finished(pb::Finished),
    /// The client took it back.
    Cancelled,
    /// It could not be finished, and why.
    Failed(Error),
    /// It was not begun, and why.
    Refused(Error),
}

/// A new mailbox's two ends.
pub fn channel() -> (Sender, Receiver) {
    let shared = Arc::new(Mutex::new(Contents::default()));
    (Sender { shared: shared.clone() }, Receiver { shared, finished: false })
}

#[derive(Debug, Default)]
struct Contents {
    tokens: Vec<pb::SampledToken>,
    prompt_logprobs: Vec<pb::PromptLogprobs>,
    ending: Option<Ending>,
    reader: Option<Waker>,
}

/// The end that the request's state machine holds.
#[derive(Debug)]
pub struct Sender {
    shared: Arc<Mutex<Contents>>,
}

impl Sender {
    /// Adds what one row of a step brought.
    pub fn push(&self, tokens: Vec<pb::SampledToken>, prompt_logprobs: Option<pb::PromptLogprobs>) {
        self.fill(|contents| {
            if contents.tokens.is_empty() {
                contents.tokens = tokens;
            } else {
                contents.tokens.extend(tokens);
            }
            contents.prompt_logprobs.extend(prompt_logprobs);
        });
    }

    /// Ends the request.
    pub fn end(self, ending: Ending) {
        self.fill(|contents| contents.ending = Some(ending));
    }

    fn fill(&self, change: impl FnOnce(&mut Contents)) {
        let reader = {
            let mut contents = self.shared.lock();
            change(&mut contents);
            contents.reader.take()
        };
        // Woken outside the lock, so that the reader does not run into it at once.
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.fill(|contents| {
            contents.ending.get_or_insert_with(|| {
                Ending::Failed(Error::internal("the request was dropped without an ending"))
            });
        });
    }
}

/// The end that the client's stream reads. The last item is an event with `finished`, or an error.
#[derive(Debug)]
pub struct Receiver {
    shared: Arc<Mutex<Contents>>,
    finished: bool,
}

impl Receiver {
    /// Whether the ending has been read.
    pub fn is_finished(&self) -> bool {
        self.finished
    }
}

impl Stream for Receiver {
    type Item = Result<pb::RequestEvent, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.finished {
            return Poll::Ready(None);
        }
        let mut contents = self.shared.lock();
        let event = contents.take_event();
        let rest = !contents.prompt_logprobs.is_empty();
        let something = !event.tokens.is_empty() || !event.prompt_logprobs.is_empty();
        // The ending travels with the last tokens, unless it is a failure: that one comes after them.
        let item = match contents.ending.take() {
            ending if rest => {
                contents.ending = ending;
                Ok(event)
            }
            Some(Ending::Finished(finished)) => Ok(pb::RequestEvent { finished: Some(finished), ..event }),
            ending if something => {
                contents.ending = ending;
                Ok(event)
            }
            Some(Ending::Cancelled) => Err(Error::new(ErrorKind::Cancelled, "the request was cancelled")),
            Some(Ending::Failed(error) | Ending::Refused(error)) => Err(error),
            None => {
                contents.reader = Some(context.waker().clone());
                return Poll::Pending;
            }
        };
        drop(contents);
        self.finished = item.as_ref().map_or(true, |event| event.finished.is_some());
        Poll::Ready(Some(item))
    }
}

impl Contents {
    fn take_event(&mut self) -> pb::RequestEvent {
        let mut taken = 0;
        let mut pieces = 0;
        for piece in &self.prompt_logprobs {
            // At least one piece an event: a piece is at most one step's share of a prompt.
            if pieces > 0 && taken + piece.tokens.len() > MAX_PROMPT_LOGPROBS_PER_EVENT {
                break;
            }
            taken += piece.tokens.len();
            pieces += 1;
        }
        let rest = self.prompt_logprobs.split_off(pieces);
        let prompt_logprobs = mem::replace(&mut self.prompt_logprobs, rest);
        // Prompt first: a reader sees the whole prompt before the first token of the output.
        let tokens = if self.prompt_logprobs.is_empty() { mem::take(&mut self.tokens) } else { Vec::new() };
        pb::RequestEvent { tokens, prompt_logprobs, finished: None }
    }
}

#[cfg(test)]
mod tests {
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
}
