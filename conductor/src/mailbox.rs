//! A request's output: one mailbox, filled by worker reports and emptied by the client's stream.
//!
//! Tokens that arrive between two reads become one event, so a slow reader gets fewer and larger events and never
//! delays a worker. The request itself bounds the contents of its mailbox: at most `max_tokens` tokens and one logprob
//! per prompt token. An [`OutputRoom`] bounds the contents of all mailboxes together.
//!
//! [`Sender::end`] consumes the sender, so a request has exactly one ending. If a sender is dropped without an ending,
//! its request ends as an internal failure, so no client waits forever.

use std::{
    mem,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll, Waker},
};

use parking_lot::Mutex;
use tokio_stream::Stream;
use tutti_proto::cluster::v1 as pb;
use tutti_runtime::{
    Error, ErrorKind,
    output_room::{HeldOutput, OutputRoom, logprob_bytes, token_bytes},
};

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

/// Creates a mailbox: the half that sends and the half that receives. Its contents take a part of `room`.
pub fn channel(room: &OutputRoom) -> (Sender, Receiver) {
    let shared = Arc::new_cyclic(|mailbox: &Weak<Mailbox>| {
        let mailbox = mailbox.clone();
        let end = move |error| {
            if let Some(mailbox) = mailbox.upgrade() {
                mailbox.abandon(error);
            }
        };
        Mailbox { contents: Mutex::default(), held: room.enter(end) }
    });
    (Sender { shared: shared.clone() }, Receiver { shared, finished: false })
}

#[derive(Debug)]
struct Mailbox {
    contents: Mutex<Contents>,
    /// The part of the room that the contents take.
    held: HeldOutput,
}

#[derive(Debug, Default)]
struct Contents {
    tokens: Vec<pb::SampledToken>,
    prompt_logprobs: Vec<pb::PromptLogprobs>,
    ending: Option<Ending>,
    /// The error that ended the request because its contents were too large. Nothing is added any more.
    abandoned: Option<Error>,
    reader: Option<Waker>,
}

impl Mailbox {
    /// Drops the contents, and ends the request with this error.
    fn abandon(&self, error: Error) {
        self.fill(|contents| {
            let reader = contents.reader.take();
            let ending = Some(Ending::Failed(error.clone()));
            *contents = Contents { ending, abandoned: Some(error), reader, ..Contents::default() };
        });
    }

    fn fill<T>(&self, change: impl FnOnce(&mut Contents) -> T) -> T {
        let (result, reader) = {
            let mut contents = self.contents.lock();
            (change(&mut contents), contents.reader.take())
        };
        // The reader is woken after the lock is released, so that the reader does not wait for the lock.
        if let Some(reader) = reader {
            reader.wake();
        }
        result
    }
}

/// The sending half, which the request's state machine holds.
#[derive(Debug)]
pub struct Sender {
    shared: Arc<Mailbox>,
}

impl Sender {
    /// Adds the output of one step for this request: new tokens, and logprobs of a part of the prompt. Returns an error
    /// if the request ends because its reader leaves too much unread.
    pub fn push(
        &self,
        tokens: Vec<pb::SampledToken>,
        prompt_logprobs: Option<pb::PromptLogprobs>,
    ) -> Result<(), Error> {
        let bytes =
            token_bytes(&tokens) + prompt_logprobs.as_ref().map_or(0, |piece| logprob_bytes(&piece.tokens));
        self.shared.held.add(bytes);
        self.shared.fill(|contents| {
            if let Some(error) = &contents.abandoned {
                return Err(error.clone());
            }
            if contents.tokens.is_empty() {
                contents.tokens = tokens;
            } else {
                contents.tokens.extend(tokens);
            }
            contents.prompt_logprobs.extend(prompt_logprobs);
            Ok(())
        })
    }

    /// Ends the request, unless its ending is there already because its reader leaves too much unread.
    pub fn end(self, ending: Ending) {
        self.shared.fill(|contents| {
            if contents.abandoned.is_none() {
                contents.ending = Some(ending);
            }
        });
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.shared.fill(|contents| {
            if contents.abandoned.is_none() {
                contents.ending.get_or_insert_with(|| {
                    Ending::Failed(Error::internal("the request was dropped without an ending"))
                });
            }
        });
    }
}

/// The receiving half, which the client's stream reads. The last item is an event with `finished`, or an error.
#[derive(Debug)]
pub struct Receiver {
    shared: Arc<Mailbox>,
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
        let mut contents = self.shared.contents.lock();
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
        if let Ok(event) = &item {
            let pieces = event.prompt_logprobs.iter().map(|piece| logprob_bytes(&piece.tokens));
            self.shared.held.remove(token_bytes(&event.tokens) + pieces.sum::<usize>());
        }
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
