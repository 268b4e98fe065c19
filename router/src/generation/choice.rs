//! One choice (one of the answers that a request asks for): turns the conductor's events into text and tokens.

mod parsed;

use std::{collections::VecDeque, sync::Arc};

use tutti_formats::{Event, Parser, Tools};
use tutti_proto::cluster::v1::{FinishReason, Finished, RequestEvent, SampledToken, TokenLogprob};
use tutti_runtime::{Error, output_room::output_bytes};

use super::{
    finish::{CallCounts, Finish, Reason},
    prompt_logprobs::PromptLogprobs,
};
use crate::text::{
    detokenizer::Detokenizer,
    stop::{Progress, StopMatcher},
};

/// An output token.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputToken {
    /// The token's id.
    pub id: u32,
    /// The token's logprob, if requested.
    pub logprob: Option<TokenLogprob>,
    /// Number of characters of output text before the token.
    pub offset: usize,
}

/// New text and tokens of one choice. A token is delivered together with the last character of its text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Index of the choice.
    pub choice: u32,
    /// True in the first delta of each choice.
    pub first: bool,
    /// Logprobs of all prompt tokens except the first. Set only in the choice's first delta, and only if requested.
    pub prompt_logprobs: Option<Arc<[TokenLogprob]>>,
    /// New text, whole characters only. Empty if the answer is read into parts.
    pub text: String,
    /// New parts of an answer that is read into reasoning, content and calls.
    pub parts: Vec<Event>,
    /// New tokens.
    pub tokens: Vec<OutputToken>,
    /// Set in the last delta of each choice.
    pub finish: Option<Finish>,
}

impl Delta {
    /// Memory of the new tokens, in bytes.
    pub fn token_bytes(&self) -> usize {
        self.tokens.iter().map(|token| output_bytes(token.logprob.as_ref())).sum()
    }

    /// The new parts of the answer. Without a parser, all text is content.
    pub fn take_parts(&mut self) -> Vec<Event> {
        if !self.text.is_empty() {
            self.parts.push(Event::Content(std::mem::take(&mut self.text)));
        }
        std::mem::take(&mut self.parts)
    }

    /// Size of the new text in bytes.
    pub fn text_bytes(&self) -> usize {
        self.text.len() + self.parts.iter().map(Event::bytes).sum::<usize>()
    }

    /// Adds a part of the answer, to the last part if it is the same text.
    pub fn add_part(&mut self, part: Event) {
        let rest = match self.parts.last_mut() {
            Some(last) => last.merge(part),
            None => Some(part),
        };
        self.parts.extend(rest);
    }

    /// Logprobs of all prompt tokens except the first; empty if this delta has none.
    pub fn prompt_logprobs(&self) -> &[TokenLogprob] {
        self.prompt_logprobs.as_deref().unwrap_or_default()
    }
}

/// Settings of one choice.
pub struct ChoiceSettings {
    /// Index of the choice in the response.
    pub index: u32,
    /// `None` with `skip_tokenizer_init`.
    pub detokenizer: Option<Detokenizer>,
    /// The request's stop strings.
    pub stops: Arc<[String]>,
    /// True if the stop string or stop token stays in the text.
    pub include_stop: bool,
    /// No stop string may end in the text of the first `min_tokens` output tokens.
    pub min_tokens: u32,
    /// Tokens that may end the output: the request's stop tokens, and the model's end-of-sequence tokens unless
    /// `ignore_eos` is set.
    pub ending_tokens: Arc<[u32]>,
    /// Number of prompt logprobs that will arrive; `None` if they are not requested for this choice.
    pub prompt_logprobs: Option<usize>,
    /// Reads the output into reasoning, content and calls; `None` if all of it is text.
    pub parser: Option<Parser>,
    /// The tools that the request declares.
    pub tools: Arc<Tools>,
}

/// The state of one choice.
pub struct Choice {
    settings: ChoiceSettings,
    matcher: StopMatcher,
    prompt_logprobs: Option<PromptLogprobs>,
    /// Tokens whose text is not released yet, each with the value of `produced` after that token.
    held: VecDeque<(OutputToken, usize)>,
    /// The last token, if it is one of `ending_tokens` and `include_stop` is false. The token's text is shown only if a
    /// later event says that the token did not end the output.
    undecided: Option<OutputToken>,
    /// Number of bytes of text that the received tokens have produced.
    produced: usize,
    /// Number of bytes of text that are released so far. Later bytes may still be part of a stop string.
    released: usize,
    /// Number of characters of text that the received tokens have produced.
    produced_chars: usize,
    /// Number of tokens received.
    generated: u32,
    /// True after the first delta.
    started: bool,
    /// The calls so far.
    calls: CallCounts,
    /// Number of tokens of the reasoning of an output that has ended.
    reasoning_tokens: Option<u32>,
}

impl Choice {
    /// Creates a choice that has received no event.
    pub fn new(settings: ChoiceSettings) -> Self {
        Self {
            matcher: StopMatcher::new(settings.stops.clone()),
            prompt_logprobs: settings.prompt_logprobs.map(PromptLogprobs::new),
            settings,
            held: VecDeque::new(),
            undecided: None,
            produced: 0,
            released: 0,
            produced_chars: 0,
            generated: 0,
            started: false,
            calls: CallCounts::default(),
            reasoning_tokens: None,
        }
    }

    /// Applies an event. Returns the delta that the client gets now, if any. No event may follow a delta with `finish`.
    pub fn take(&mut self, event: RequestEvent) -> Result<Option<Delta>, Error> {
        for run in event.prompt_logprobs {
            match &mut self.prompt_logprobs {
                Some(collected) => collected.add(run)?,
                None => return Err(Error::internal("received prompt logprobs that were not requested")),
            }
        }
        let mut delta = Delta { choice: self.settings.index, ..Delta::default() };
        for token in event.tokens {
            if let Some(reason) = self.take_token(token, &mut delta)? {
                return self.finish(reason, 0, delta).map(Some);
            }
        }
        if let Some(finished) = event.finished {
            return self.take_end(finished, delta).map(Some);
        }
        self.release_tokens(&mut delta.tokens);
        if delta.text.is_empty() && delta.parts.is_empty() && delta.tokens.is_empty() {
            return Ok(None);
        }
        self.open(&mut delta)?;
        Ok(Some(delta))
    }

    /// Applies a sampled token. Returns a reason if a stop string ended the choice.
    fn take_token(&mut self, token: SampledToken, out: &mut Delta) -> Result<Option<Reason>, Error> {
        if token.index != self.generated {
            let message = format!("received output token {}, expected {}", token.index, self.generated);
            return Err(Error::internal(message));
        }
        if let Some(earlier) = self.undecided.take()
            && let Some(reason) = self.show(earlier, out)
        {
            return Ok(Some(reason));
        }
        self.generated += 1;
        let ends = self.settings.ending_tokens.contains(&token.token_id);
        let token = OutputToken { id: token.token_id, logprob: token.logprob, offset: 0 };
        if ends && !self.settings.include_stop {
            self.undecided = Some(token);
            return Ok(None);
        }
        Ok(self.show(token, out))
    }

    /// Turns a token into text, and appends the released text to `out`. Returns a reason if the choice ends with it.
    fn show(&mut self, mut token: OutputToken, out: &mut Delta) -> Option<Reason> {
        if self.settings.parser.is_some() {
            return self.read(token, out);
        }
        let piece = self.settings.detokenizer.as_mut().map(|d| d.push(token.id)).unwrap_or_default();
        let text = piece.text;
        token.offset = self.produced_chars + piece.earlier;
        self.produced += text.len();
        self.produced_chars += text.chars().count();
        self.held.push_back((token, self.produced));
        self.search(&text, &mut out.text)
    }

    /// Searches text for the stop strings, and appends the released text to `out`. Returns a reason if a stop string
    /// ended the choice. The first `min_tokens` tokens may begin a stop string, but not end one.
    fn search(&mut self, text: &str, out: &mut String) -> Option<Reason> {
        let progress = match self.generated <= self.settings.min_tokens {
            true => Progress::Text(self.matcher.pass(text)),
            false => self.matcher.push(text),
        };
        match progress {
            Progress::Text(text) => {
                self.released += text.len();
                out.push_str(&text);
                None
            }
            Progress::Matched { before, stop } => {
                out.push_str(&before);
                let stop = self.settings.stops.get(stop).cloned().unwrap_or_default();
                if self.settings.include_stop {
                    out.push_str(&stop);
                }
                Some(Reason::StopString(stop))
            }
        }
    }

    /// Applies the conductor's terminal event.
    fn take_end(&mut self, finished: Finished, mut delta: Delta) -> Result<Delta, Error> {
        let reason = match finished.reason() {
            FinishReason::EndOfSequence => Reason::EndOfSequence,
            FinishReason::StopToken => Reason::StopToken(finished.stop_token_id.unwrap_or_default()),
            FinishReason::Length => Reason::Length,
            FinishReason::Unspecified => return Err(Error::internal("a request finished without a reason")),
        };
        if finished.generated != self.generated {
            let message =
                format!("received {} output tokens of {} generated", self.generated, finished.generated);
            return Err(Error::internal(message));
        }
        if self.settings.parser.is_some() {
            let mut ending = self.undecided.take();
            if reason == Reason::Length
                && let Some(token) = ending.take()
                && let Some(reason) = self.show(token, &mut delta)
            {
                return self.finish(reason, finished.cached_tokens, delta);
            }
            let stopped = self.read_end(ending, &mut delta);
            return self.finish(stopped.unwrap_or(reason), finished.cached_tokens, delta);
        }
        if let Some(token) = self.undecided.take() {
            if reason == Reason::Length {
                if let Some(reason) = self.show(token, &mut delta) {
                    return self.finish(reason, finished.cached_tokens, delta);
                }
            } else {
                let token = OutputToken { offset: self.produced_chars, ..token };
                self.held.push_back((token, self.produced));
            }
        }
        let rest = self.settings.detokenizer.as_mut().map(Detokenizer::flush).unwrap_or_default();
        if let Some(stopped) = self.search(&rest, &mut delta.text) {
            return self.finish(stopped, finished.cached_tokens, delta);
        }
        delta.text.push_str(&self.matcher.flush());
        self.finish(reason, finished.cached_tokens, delta)
    }

    fn finish(&mut self, reason: Reason, cached_tokens: u32, mut delta: Delta) -> Result<Delta, Error> {
        delta.tokens.extend(self.held.drain(..).map(|(token, _)| token));
        let reasoning_tokens = match &self.settings.parser {
            Some(parser) => Some(parser.reasoning_tokens()),
            None => self.reasoning_tokens,
        };
        let Self { generated, calls, .. } = *self;
        delta.finish = Some(Finish { reason, generated, cached_tokens, reasoning_tokens, calls });
        self.open(&mut delta)?;
        Ok(delta)
    }

    /// Moves the tokens whose whole text is released from `held` to `out`.
    fn release_tokens(&mut self, out: &mut Vec<OutputToken>) {
        while let Some((token, _)) = self.held.pop_front_if(|(_, end)| *end <= self.released) {
            out.push(token);
        }
    }

    /// Marks the first delta, and adds the prompt's logprobs to it.
    fn open(&mut self, delta: &mut Delta) -> Result<(), Error> {
        delta.first = !std::mem::replace(&mut self.started, true);
        if delta.first
            && let Some(collected) = self.prompt_logprobs.take()
        {
            delta.prompt_logprobs = Some(collected.complete()?.into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
