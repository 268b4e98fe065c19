//! The running choices of one request, merged into one stream of deltas.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};

use futures_util::{
    Stream, StreamExt,
    stream::{BoxStream, FusedStream, SelectAll},
};
use tokio::sync::OwnedSemaphorePermit;
use tutti_proto::cluster::v1::RequestEvent;
use tutti_runtime::Error;

use super::{
    attempts::Attempts,
    choice::{Choice, Delta},
    prompts::EncodedPrompt,
    request::Output,
};
use crate::{
    metrics::{Outcome, RequestMeter},
    served::ServedModel,
};

/// Numbers of prompt and output tokens of one request, as in OpenAI's `usage`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of all prompts. Each prompt counts once, even if it has several choices.
    pub prompt_tokens: u32,
    /// Output tokens of all choices.
    pub completion_tokens: u32,
    /// Prompt tokens that the first choice of each prompt took from the prefix cache.
    pub cached_tokens: u32,
}

/// A running request. Dropping it closes the conductors' streams, which cancels the running choices.
pub struct Generation {
    /// The served model.
    pub model: Arc<ServedModel>,
    /// The encoded prompts. Choice `i` continues prompt `i / n`.
    pub prompts: Vec<EncodedPrompt>,
    /// Choices per prompt.
    pub n: u32,
    /// Requested outputs besides the text.
    pub output: Output,
    choices: SelectAll<ChoiceStream>,
    unfinished: usize,
    usage: Usage,
    meter: RequestMeter,
    _permits: OwnedSemaphorePermit,
}

/// A request of which every choice has been accepted by a conductor.
pub(super) struct Accepted {
    /// The served model.
    pub model: Arc<ServedModel>,
    /// The encoded prompts.
    pub prompts: Vec<EncodedPrompt>,
    /// Choices per prompt.
    pub n: u32,
    /// Requested outputs besides the text.
    pub output: Output,
    /// The choices, in order.
    pub choices: Vec<ChoiceStream>,
    /// One permit per choice. All are given back at the end of the request.
    pub permits: OwnedSemaphorePermit,
}

impl Generation {
    pub(super) fn new(accepted: Accepted, meter: RequestMeter) -> Self {
        let Accepted { model, prompts, n, output, choices, permits } = accepted;
        let prompt_tokens = prompts.iter().map(|p| p.ids.len() as u32).sum();
        meter.accepted(prompt_tokens);
        Self {
            model,
            prompts,
            n,
            output,
            unfinished: choices.len(),
            choices: choices.into_iter().collect(),
            usage: Usage { prompt_tokens, ..Usage::default() },
            meter,
            _permits: permits,
        }
    }

    /// The next delta of any choice. `None` once all choices have finished, or after an error, which ends the request.
    pub async fn next(&mut self) -> Option<Result<Delta, Error>> {
        if self.choices.is_terminated() {
            return None;
        }
        let delta = match self.choices.next().await? {
            Ok(delta) => delta,
            Err(error) => {
                self.choices.clear();
                self.meter.ends(Outcome::of(&error, Outcome::Failed));
                return Some(Err(error));
            }
        };
        self.meter.delta(delta.choice, delta.tokens.len(), Instant::now());
        if let Some(finish) = &delta.finish {
            self.usage.completion_tokens += finish.generated;
            if delta.choice.is_multiple_of(self.n) {
                self.usage.cached_tokens += finish.cached_tokens;
            }
            self.unfinished -= 1;
            if self.unfinished == 0 {
                self.meter.ends(Outcome::Finished);
            }
        }
        Some(Ok(delta))
    }

    /// Token counts so far. They are complete when [`Generation::next`] has returned `None`.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// Number of choices.
    pub fn choice_count(&self) -> usize {
        self.prompts.len() * self.n as usize
    }

    /// The prompt that a choice continues.
    pub fn prompt_of(&self, choice: u32) -> &EncodedPrompt {
        &self.prompts[(choice / self.n) as usize]
    }
}

/// One choice's stream of deltas. After the delta with `finish`, or after an error, the stream ends and drops the
/// conductor's stream.
pub struct ChoiceStream {
    choice: Choice,
    events: Option<BoxStream<'static, Result<RequestEvent, Error>>>,
}

impl ChoiceStream {
    pub(super) fn new(choice: Choice, attempts: Attempts) -> Self {
        Self { choice, events: Some(attempts.into_stream().boxed()) }
    }

    /// Turns an event, or the end of the events, into a delta or an error; `None` if the client gets nothing.
    fn on_event(&mut self, event: Option<Result<RequestEvent, Error>>) -> Option<Result<Delta, Error>> {
        match event {
            Some(Ok(event)) => self.choice.take(event).transpose(),
            Some(Err(error)) => Some(Err(error)),
            None => Some(Err(Error::internal("the events of an unfinished request have ended"))),
        }
    }
}

impl Stream for ChoiceStream {
    type Item = Result<Delta, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Some(events) = &mut self.events else { return Poll::Ready(None) };
            let event = std::task::ready!(events.poll_next_unpin(cx));
            let Some(item) = self.on_event(event) else { continue };
            if item.as_ref().map_or(true, |delta| delta.finish.is_some()) {
                self.events = None;
            }
            return Poll::Ready(Some(item));
        }
    }
}
