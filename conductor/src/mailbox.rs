//! A request's output: one mailbox, filled by worker reports and emptied by the client's stream.
//!
//! Tokens that arrive between two reads become one event, so a slow reader gets fewer and larger events and never
//! delays a worker. The request itself bounds the contents of its mailbox: at most `max_tokens` tokens and one logprob
//! per prompt token.
//!
//! [`Sender::end`] consumes the sender, so a request has exactly one ending. If a sender is dropped without an ending,
//! its request ends as an internal failure, so no client waits forever.

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

/// Maximum number of prompt logprobs per event. With 20 alternatives each, an event stays well under the largest gRPC
/// message.
const MAX_PROMPT_LOGPROBS_PER_EVENT: usize = 16_384;

/// The ending of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Ending {
    /// The request ran to its end.
    Finished(pb::Finished),
    /// The client cancelled the request.
    Cancelled,
    /// The request failed with this error.
    Failed(Error),
    /// The request was refused with this error before the request began.
    Refused(Error),
}

/// Creates a mailbox: the half that sends and the half that receives.
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

/// The sending half, which the request's state machine holds.
#[derive(Debug)]
pub struct Sender {
    shared: Arc<Mutex<Contents>>,
}

impl Sender {
    /// Adds the output of one step for this request: new tokens, and logprobs of a part of the prompt.
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
        // The reader is woken after the lock is released, so that the reader does not wait for the lock.
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

/// The receiving half, which the client's stream reads. The last item is an event with `finished`, or an error.
#[derive(Debug)]
pub struct Receiver {
    shared: Arc<Mutex<Contents>>,
    finished: bool,
}

impl Receiver {
    /// True once the ending has been read.
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
        // `Finished` is sent in the same event as the last tokens. A failure is sent as a separate item after the last
        // tokens.
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
            // An event takes at least one piece of logprobs, whatever the piece's size. A piece covers at most the
            // prompt tokens of one step.
            if pieces > 0 && taken + piece.tokens.len() > MAX_PROMPT_LOGPROBS_PER_EVENT {
                break;
            }
            taken += piece.tokens.len();
            pieces += 1;
        }
        let rest = self.prompt_logprobs.split_off(pieces);
        let prompt_logprobs = mem::replace(&mut self.prompt_logprobs, rest);
        // All prompt logprobs are sent before the first output token, so tokens wait while logprobs are left.
        let tokens = if self.prompt_logprobs.is_empty() { mem::take(&mut self.tokens) } else { Vec::new() };
        pb::RequestEvent { tokens, prompt_logprobs, finished: None }
    }
}

#[cfg(test)]
mod tests;
