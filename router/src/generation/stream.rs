//! The running choices of one request, merged into one stream of deltas.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use futures_util::{
    Stream, StreamExt,
    stream::{BoxStream, FusedStream, SelectAll},
};
use tutti_proto::cluster::v1::{RequestEvent, TokenLogprob};
use tutti_runtime::{
    Error,
    output_room::{HeldOutput, logprob_bytes, token_bytes},
};

use super::{
    admission::Queued,
    attempts::Attempts,
    choice::{Choice, Delta},
    decode::{MediaLease, MediaTokens},
    permits::Permit,
    prompts::EncodedPrompt,
    request::Output,
    shared_logprobs::SharedLogprobs,
};
use crate::{
    keys::{Entry, Share},
    metrics::{Outcome, RequestMeter, RequestName},
    served::ServedModel,
    text::pool::{Lane, TextWork},
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
    /// Tokens of the reasoning of all choices, with its markers. `None` if answers are not read into parts.
    pub reasoning_tokens: Option<u32>,
    /// Prompt tokens of media.
    pub media: MediaTokens,
}

/// The constant data of a running request. Answers are written from this data.
pub struct GenerationInfo {
    /// The served model.
    pub model: Arc<ServedModel>,
    /// The encoded prompts. Choice `i` continues prompt `i / n`.
    pub prompts: Vec<EncodedPrompt>,
    /// Choices per prompt.
    pub n: u32,
    /// Requested outputs besides the text.
    pub output: Output,
    /// The caller's share, by which the text pool divides waiting work fairly.
    pub share: Share,
}

/// Time after which a client whose answer found no room may try again.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Approximate bytes of an answer per logprob entry: a token's string, its logprob, and the names of the JSON members.
const ENTRY_BYTES: usize = 64;
/// Approximate bytes of an answer per token id.
const ID_BYTES: usize = 8;

impl GenerationInfo {
    /// Number of choices.
    pub fn choice_count(&self) -> usize {
        self.prompts.len() * self.n as usize
    }

    /// The prompt that a choice continues.
    pub fn prompt_of(&self, choice: u32) -> &EncodedPrompt {
        &self.prompts[(choice / self.n) as usize]
    }

    /// The work in the text pool that writes an answer of about this many bytes.
    pub fn writing(&self, bytes: usize) -> TextWork {
        TextWork { lane: Lane::Render, share: self.share, bytes }
    }

    /// Approximate size of the written delta in bytes. The size decides whether the delta is written in place or in the
    /// text pool.
    pub fn estimate(&self, delta: &Delta) -> usize {
        let outputs = delta.tokens.len()
            * (ID_BYTES + ENTRY_BYTES * self.output.logprobs.map_or(0, |top| top as usize + 1));
        if !delta.first {
            return outputs + delta.text_bytes();
        }
        let prompt = self.prompt_of(delta.choice);
        let echoed = if self.output.echo { self.output.logprobs } else { None };
        let entries = |top: Option<u32>| top.map_or(0, |top| top as usize + 1);
        let per_token = ID_BYTES + ENTRY_BYTES * (entries(self.output.prompt_logprobs) + entries(echoed));
        outputs + delta.text_bytes() + prompt.text.len() + prompt.ids.len() * per_token
    }
}

/// A running request. Dropping it closes the conductors' streams, which cancels the running choices.
pub struct Generation {
    /// The part of the request that does not change.
    pub info: Arc<GenerationInfo>,
    choices: SelectAll<ChoiceStream>,
    unfinished: usize,
    usage: Usage,
    meter: RequestMeter,
    /// The request's place in its queue, until the request has an output token.
    queued: Option<Queued>,
    spent: Spent,
    unread: HeldOutput,
    /// Bytes of the delta that was returned last.
    returned_bytes: usize,
    /// True if the deltas are kept until the last one.
    keeps_deltas: bool,
    _permits: Permit,
    _media: Option<MediaLease>,
}

/// The output tokens of a request, charged to its caller when the request ends, whatever its outcome.
struct Spent {
    entry: Entry,
    tokens: u64,
}

impl Drop for Spent {
    fn drop(&mut self) {
        self.entry.charge(self.tokens);
    }
}

/// A request whose choices have all been accepted by conductors.
pub(super) struct Accepted {
    /// The part of the request that does not change.
    pub info: Arc<GenerationInfo>,
    /// The choices, in order.
    pub choices: Vec<ChoiceStream>,
    /// One permit per choice. The permits are released at the end of the request.
    pub permits: Permit,
    /// The request's place in its queue.
    pub queued: Queued,
    /// The request's part of the room for output.
    pub unread: HeldOutput,
    /// The memory of the request's media, which are kept in case the request is sent again.
    pub media: Option<MediaLease>,
}

impl Generation {
    pub(super) fn new(accepted: Accepted, entry: Entry, mut meter: RequestMeter) -> Self {
        let Accepted { info, choices, permits, queued, unread, media } = accepted;
        let prompt_tokens = info.prompts.iter().map(|p| p.ids.len() as u32).sum();
        let media_tokens = MediaTokens::of(info.prompts.iter().flat_map(|prompt| &prompt.media));
        meter.accepted(prompt_tokens);
        entry.charge(prompt_tokens.into());
        Self {
            info,
            unfinished: choices.len(),
            choices: choices.into_iter().collect(),
            usage: Usage { prompt_tokens, media: media_tokens, ..Usage::default() },
            meter,
            queued: Some(queued),
            spent: Spent { entry, tokens: 0 },
            unread,
            returned_bytes: 0,
            keeps_deltas: false,
            _permits: permits,
            _media: media,
        }
    }

    /// Announces that the deltas are kept until the last one, as for an answer that is not streamed.
    pub fn keep_deltas(&mut self) {
        self.keeps_deltas = true;
    }

    /// The error of a request that ends because the room for output is full and this request has most of it.
    fn unread_error(&self) -> Option<Error> {
        let error = self.unread.error()?;
        // A request whose deltas are kept has no reader yet that could be slow.
        Some(if self.keeps_deltas { Error::overloaded(error.message(), RETRY_AFTER) } else { error })
    }

    /// The next delta of any choice. `None` once all choices have finished, or after an error, which ends the request.
    pub async fn next(&mut self) -> Option<Result<Delta, Error>> {
        if self.choices.is_terminated() {
            return None;
        }
        if !self.keeps_deltas {
            self.unread.remove(std::mem::take(&mut self.returned_bytes));
        }
        let delta = self.choices.next().await?;
        let delta = match self.unread_error().map_or(delta, Err) {
            Ok(delta) => delta,
            Err(error) => {
                self.choices.clear();
                self.meter.fails(&error, Outcome::Failed);
                return Some(Err(error));
            }
        };
        self.meter.delta(delta.choice, delta.tokens.len(), Instant::now());
        self.spent.tokens += delta.tokens.len() as u64;
        self.returned_bytes = delta.token_bytes();
        if self.info.n == 1 {
            // The logprobs of a prompt with several choices stay until the request's end.
            self.returned_bytes += logprob_bytes(delta.prompt_logprobs());
        }
        if !delta.tokens.is_empty()
            && let Some(queued) = self.queued.take()
        {
            queued.has_token();
        }
        if let Some(finish) = &delta.finish {
            self.usage.completion_tokens += finish.generated;
            if let Some(tokens) = finish.reasoning_tokens {
                *self.usage.reasoning_tokens.get_or_insert_default() += tokens;
            }
            if delta.choice.is_multiple_of(self.info.n) {
                self.usage.cached_tokens += finish.cached_tokens;
            }
            self.meter.choice_ended(finish.word(), finish.calls);
            self.unfinished -= 1;
            if self.unfinished == 0 {
                self.meter.finished(self.usage);
            }
        }
        Some(Ok(delta))
    }

    /// The request's name in logs.
    pub fn name(&self) -> RequestName {
        self.meter.name()
    }

    /// Token counts so far. They are complete when [`Generation::next`] has returned `None`.
    pub fn usage(&self) -> Usage {
        self.usage
    }
}

/// One choice's stream of deltas. After the delta with `finish`, or after an error, the stream ends and drops the
/// conductor's stream.
pub struct ChoiceStream {
    choice: Choice,
    events: Option<BoxStream<'static, Result<RequestEvent, Error>>>,
    prompt: PromptScores,
    unread: HeldOutput,
}

/// The role of a choice in reporting the logprobs of its prompt.
enum PromptScores {
    /// The logprobs are not requested, or this choice has reported them.
    None,
    /// The choice is the prompt's first one. It receives the logprobs, and shares them with its first delta.
    Receives(SharedLogprobs),
    /// The choice waits for the logprobs before its first event.
    Awaits(SharedLogprobs),
    /// The choice has the logprobs, and reports them with its first delta.
    Has(Arc<[TokenLogprob]>),
}

impl PromptScores {
    /// Handles a choice's first delta. The prompt's first choice shares the logprobs of its delta. Every other choice
    /// adds the shared logprobs to its delta.
    fn settle(&mut self, delta: &mut Delta) {
        if !delta.first {
            return;
        }
        match std::mem::replace(self, Self::None) {
            Self::Receives(shared) => shared.set(delta.prompt_logprobs.clone().unwrap_or_default()),
            Self::Has(logprobs) => delta.prompt_logprobs = Some(logprobs),
            Self::None | Self::Awaits(_) => {}
        }
    }
}

impl ChoiceStream {
    /// Creates a choice's stream. `first` is true for the first choice of a prompt, and `shared` is set if the prompt's
    /// logprobs are requested.
    pub(super) fn new(
        choice: Choice,
        attempts: Attempts,
        first: bool,
        shared: Option<SharedLogprobs>,
        unread: HeldOutput,
    ) -> Self {
        let prompt = match shared {
            None => PromptScores::None,
            Some(shared) if first => PromptScores::Receives(shared),
            Some(shared) => PromptScores::Awaits(shared),
        };
        Self { choice, events: Some(attempts.into_stream().boxed()), prompt, unread }
    }

    /// Turns an event, or the end of the events, into a delta or an error; `None` if the client gets nothing.
    fn on_event(&mut self, event: Option<Result<RequestEvent, Error>>) -> Option<Result<Delta, Error>> {
        match event {
            Some(Ok(event)) => {
                let scored = event.prompt_logprobs.iter().map(|piece| logprob_bytes(&piece.tokens));
                self.unread.add(token_bytes(&event.tokens) + scored.sum::<usize>());
                self.choice.take(event).transpose()
            }
            Some(Err(error)) => Some(Err(error)),
            None => Some(Err(Error::internal("the events of an unfinished request have ended"))),
        }
    }
}

impl Stream for ChoiceStream {
    type Item = Result<Delta, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let PromptScores::Awaits(shared) = &self.prompt {
            let logprobs = std::task::ready!(shared.poll(cx));
            self.prompt = PromptScores::Has(logprobs);
        }
        loop {
            let Some(events) = &mut self.events else { return Poll::Ready(None) };
            let event = std::task::ready!(events.poll_next_unpin(cx));
            let Some(mut item) = self.on_event(event) else { continue };
            if let Ok(delta) = &mut item {
                self.prompt.settle(delta);
            }
            if item.as_ref().map_or(true, |delta| delta.finish.is_some()) {
                self.events = None;
            }
            return Poll::Ready(Some(item));
        }
    }
}
