//! One choice: the conductor's events in, text and tokens out.

use std::{collections::VecDeque, sync::Arc};

use tutti_proto::cluster::v1::{FinishReason, Finished, RequestEvent, SampledToken, TokenLogprob};
use tutti_runtime::Error;

use super::prompt_logprobs::PromptLogprobs;
use crate::text::{
    detokenizer::Detokenizer,
    stop::{Progress, StopMatcher},
};

/// A token of the output.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputToken {
    /// Its id.
    pub id: u32,
    /// When asked for.
    pub logprob: Option<TokenLogprob>,
    /// How many characters of the output's text stand before it.
    pub offset: usize,
}

/// What is new about one choice. Text and tokens go together: a token comes with the last of its text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Which choice.
    pub choice: u32,
    /// Set in the first delta of each choice.
    pub first: bool,
    /// In the first delta, when asked for: one for each prompt token but the first, which has none.
    pub prompt_logprobs: Vec<TokenLogprob>,
    /// New text, whole characters only.
    pub text: String,
    /// New tokens.
    pub tokens: Vec<OutputToken>,
    /// Set in the last delta of each choice.
    pub finish: Option<Finish>,
}

/// How a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// Why.
    pub reason: Reason,
    /// Tokens generated, those that a stop string removed included.
    pub generated: u32,
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: u32,
}

/// Why a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// An end-of-sequence token of the model.
    EndOfSequence,
    /// One of the request's stop tokens.
    StopToken(u32),
    /// One of the request's stop strings.
    StopString(String),
    /// `max_tokens`, or the end of the context.
    Length,
}

/// What one choice is told at its start.
pub struct ChoiceSettings {
    /// Its place in the response.
    pub index: u32,
    /// None under `skip_tokenizer_init`.
    pub detokenizer: Option<Detokenizer>,
    /// The request's stop strings.
    pub stops: Arc<[String]>,
    /// Whether what stopped the output stays in its text.
    pub include_stop: bool,
    /// No stop string before this many tokens.
    pub min_tokens: u32,
    /// Tokens that may end the output: the request's, and the model's unless `ignore_eos`.
    pub ending_tokens: Arc<[u32]>,
    /// How many prompt logprobs will come; none if they were not asked for.
    pub prompt_logprobs: Option<usize>,
}

/// The state of one choice.
pub struct Choice {
    settings: ChoiceSettings,
    matcher: StopMatcher,
    prompt_logprobs: Option<PromptLogprobs>,
    /// Tokens whose text has not been let through yet, with how many bytes of text there were after each.
    held: VecDeque<(OutputToken, usize)>,
    /// A token that may turn out to have ended the output, and then has no text.
    undecided: Option<OutputToken>,
    /// Bytes of text the tokens gave, and bytes let through by the stop strings.
    produced: usize,
    released: usize,
    /// Characters of text the tokens gave.
    produced_chars: usize,
    generated: u32,
    started: bool,
}

impl Choice {
    /// A choice that has had no event yet.
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
        }
    }

    /// Takes an event; returns what a client can be told now, if anything. After a delta with `finish`, no event may
    /// follow.
    pub fn take(&mut self, event: RequestEvent) -> Result<Option<Delta>, Error> {
        for run in event.prompt_logprobs {
            match &mut self.prompt_logprobs {
                Some(collected) => collected.add(run)?,
                None => return Err(Error::internal("prompt logprobs came that were not asked for")),
            }
        }
        let mut delta = Delta { choice: self.settings.index, ..Delta::default() };
        for token in event.tokens {
            if let Some(reason) = self.take_token(token, &mut delta.text)? {
                return self.finish(reason, 0, delta).map(Some);
            }
        }
        if let Some(finished) = event.finished {
            return self.take_end(finished, delta).map(Some);
        }
        self.release_tokens(&mut delta.tokens);
        if delta.text.is_empty() && delta.tokens.is_empty() {
            return Ok(None);
        }
        self.open(&mut delta)?;
        Ok(Some(delta))
    }

    /// Takes a sampled token; a reason means that a stop string ended the choice with it.
    fn take_token(&mut self, token: SampledToken, out: &mut String) -> Result<Option<Reason>, Error> {
        if token.index != self.generated {
            let message = format!("output token {} came where {} was due", token.index, self.generated);
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

    /// Turns a token into text.
    fn show(&mut self, mut token: OutputToken, out: &mut String) -> Option<Reason> {
        token.offset = self.produced_chars;
        let text = self.settings.detokenizer.as_mut().map(|d| d.push(token.id)).unwrap_or_default();
        self.produced += text.len();
        self.produced_chars += text.chars().count();
        self.held.push_back((token, self.produced));
        // The token that completes a stop string is itself past min_tokens, as an end-of-sequence token must be.
        if self.generated <= self.settings.min_tokens {
            self.released += text.len();
            out.push_str(&text);
            return None;
        }
        self.search(&text, out)
    }

    /// Passes text through the stop strings.
    fn search(&mut self, text: &str, out: &mut String) -> Option<Reason> {
        match self.matcher.push(text) {
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

    /// Takes the conductor's word that the request has ended.
    fn take_end(&mut self, finished: Finished, mut delta: Delta) -> Result<Delta, Error> {
        let reason = match finished.reason() {
            FinishReason::EndOfSequence => Reason::EndOfSequence,
            FinishReason::StopToken => Reason::StopToken(finished.stop_token_id.unwrap_or_default()),
            FinishReason::Length => Reason::Length,
            FinishReason::Unspecified => return Err(Error::internal("a request finished without a reason")),
        };
        if finished.generated != self.generated {
            let message =
                format!("{} output tokens came of {} generated", self.generated, finished.generated);
            return Err(Error::internal(message));
        }
        if let Some(token) = self.undecided.take() {
            if reason == Reason::Length {
                if let Some(reason) = self.show(token, &mut delta.text) {
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
        delta.finish = Some(Finish { reason, generated: self.generated, cached_tokens });
        self.open(&mut delta)?;
        Ok(delta)
    }

    /// Lets go of the tokens all of whose text has been let through.
    fn release_tokens(&mut self, out: &mut Vec<OutputToken>) {
        while let Some((token, _)) = self.held.pop_front_if(|(_, end)| *end <= self.released) {
            out.push(token);
        }
    }

    /// Marks the first delta, and puts the prompt's logprobs into it.
    fn open(&mut self, delta: &mut Delta) -> Result<(), Error> {
        delta.first = !std::mem::replace(&mut self.started, true);
        if delta.first
            && let Some(collected) = self.prompt_logprobs.take()
        {
            delta.prompt_logprobs = collected.complete()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
