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

/// Tokens in and out of one request, as OpenAI's `usage` counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of all prompts, each counted once whatever `n`.
    pub prompt_tokens: u32,
    /// Of all choices.
    pub completion_tokens: u32,
    /// Of the prompts' tokens, those served from the prefix cache for each prompt's first choice.
    pub cached_tokens: u32,
}

/// A request under way. Dropping it drops the conductor's streams, which cancels what still runs.
pub struct Generation {
    /// What is served.
    pub model: Arc<ServedModel>,
    /// The prompts in tokens; choice `i` continues prompt `i / n`.
    pub prompts: Vec<EncodedPrompt>,
    /// Choices a prompt.
    pub n: u32,
    /// What was asked to be reported.
    pub output: Output,
    choices: SelectAll<ChoiceStream>,
    unfinished: usize,
    usage: Usage,
    meter: RequestMeter,
    _permits: OwnedSemaphorePermit,
}

/// A request that the conductor has accepted.
pub(super) struct Accepted {
    /// What is served.
    pub model: Arc<ServedModel>,
    /// In tokens.
    pub prompts: Vec<EncodedPrompt>,
    /// Choices a prompt.
    pub n: u32,
    /// What was asked to be reported.
    pub output: Output,
    /// In order.
    pub choices: Vec<ChoiceStream>,
    /// The choices' permits, given back with the last of the request.
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

    /// The next delta of any choice; none once all have finished. After an error the request is over.
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

    /// What has been counted so far; complete once [`Generation::next`] has returned none.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// How many choices there are.
    pub fn choice_count(&self) -> usize {
        self.prompts.len() * self.n as usize
    }

    /// The prompt that a choice continues.
    pub fn prompt_of(&self, choice: u32) -> &EncodedPrompt {
        &self.prompts[(choice / self.n) as usize]
    }
}

/// One choice's stream of deltas; it ends behind the delta with `finish`, and lets go of its conductor with it.
pub struct ChoiceStream {
    choice: Choice,
    events: Option<BoxStream<'static, Result<RequestEvent, Error>>>,
}

impl ChoiceStream {
    pub(super) fn new(choice: Choice, attempts: Attempts) -> Self {
        Self { choice, events: Some(attempts.into_stream().boxed()) }
    }

    /// What an event, or the end of the events, means; none if it has nothing for the client.
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
