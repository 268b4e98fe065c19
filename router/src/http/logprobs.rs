//! Logprobs in three formats: OpenAI's for completions, OpenAI's for chat, and vLLM's for prompts.

use std::sync::Arc;

use serde::{Serialize, Serializer, ser::SerializeMap};
use serde_json::value::{RawValue, to_raw_value};
use tutti_proto::cluster::v1::TokenLogprob;

use crate::{
    generation::{EncodedPrompt, OutputToken},
    served::ServedModel,
};

/// The lowest logprob that is reported, as in vLLM. An impossible token's logprob is minus infinity, which JSON cannot
/// express.
const LEAST: f32 = -9999.0;

fn finite(logprob: f32) -> f32 {
    logprob.max(LEAST)
}

/// The `logprobs` of a completion: four lists of equal length.
#[derive(Debug, Default, Serialize)]
pub struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<TopByToken>>,
    text_offset: Vec<usize>,
}

/// A JSON object of token strings and logprobs, likeliest first.
#[derive(Debug)]
struct TopByToken(Vec<(String, f32)>);

impl Serialize for TopByToken {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}

impl TopByToken {
    /// The likeliest tokens, and the sampled token if it is not among them.
    fn of(model: &ServedModel, id: u32, logprob: &TokenLogprob) -> Self {
        let own = (!logprob.top.iter().any(|t| t.token_id == id)).then_some((id, logprob.logprob));
        let mut names = Names::new(model, id);
        let top = logprob.top.iter().map(|t| (t.token_id, t.logprob)).chain(own);
        Self(top.map(|(id, value)| (names.of(id), finite(value))).collect())
    }
}

/// Names the alternatives of one token. Two tokens may have the same string, such as a letter and its byte. Clients use
/// the strings as keys, so of tokens with one string, all but the first are named by their ids. The sampled token keeps
/// its string.
struct Names<'a> {
    model: &'a ServedModel,
    own: u32,
    taken: Vec<String>,
}

impl<'a> Names<'a> {
    fn new(model: &'a ServedModel, own: u32) -> Self {
        Self { model, own, taken: vec![model.token_string(own)] }
    }

    fn of(&mut self, id: u32) -> String {
        let name = self.model.token_string(id);
        if id == self.own {
            return name;
        }
        if self.taken.contains(&name) {
            return format!("token_id:{id}");
        }
        self.taken.push(name.clone());
        name
    }
}

impl CompletionLogprobs {
    fn push(&mut self, model: &ServedModel, id: u32, logprob: Option<&TokenLogprob>, offset: usize) {
        self.tokens.push(model.token_string(id));
        self.token_logprobs.push(logprob.map(|l| finite(l.logprob)));
        self.top_logprobs.push(logprob.map(|l| TopByToken::of(model, id, l)));
        self.text_offset.push(offset);
    }

    /// Adds the tokens of an echoed prompt.
    pub fn push_prompt(&mut self, model: &ServedModel, prompt: &EncodedPrompt, logprobs: &[TokenLogprob]) {
        for (i, (&id, &offset)) in prompt.ids.iter().zip(prompt.offsets.iter()).enumerate() {
            let logprob = i.checked_sub(1).and_then(|before| logprobs.get(before));
            self.push(model, id, logprob, offset);
        }
    }

    /// Adds output tokens. `text_before` is the number of characters of the echoed prompt, which comes before the
    /// output.
    pub fn push_output(&mut self, model: &ServedModel, tokens: &[OutputToken], text_before: usize) {
        for token in tokens {
            self.push(model, token.id, token.logprob.as_ref(), text_before + token.offset);
        }
    }
}

/// The `logprobs` of a chat choice.
#[derive(Debug, Serialize)]
pub struct ChatLogprobs {
    content: Vec<ChatToken>,
    refusal: Option<()>,
}

#[derive(Debug, Serialize)]
struct ChatToken {
    #[serde(flatten)]
    own: ChatTop,
    top_logprobs: Vec<ChatTop>,
}

#[derive(Debug, Serialize)]
struct ChatTop {
    token: String,
    logprob: f32,
    bytes: Option<Vec<u8>>,
}

impl ChatTop {
    fn new(names: &mut Names<'_>, id: u32, logprob: f32) -> Self {
        let bytes = names.model.text.tokenizer.as_ref().map(|t| t.token_bytes(id));
        Self { token: names.of(id), logprob: finite(logprob), bytes }
    }
}

impl ChatLogprobs {
    /// The logprobs of output tokens.
    pub fn new(model: &ServedModel, tokens: &[OutputToken]) -> Self {
        let content = tokens.iter().filter_map(|token| {
            let logprob = token.logprob.as_ref()?;
            let names = &mut Names::new(model, token.id);
            let top = logprob.top.iter().map(|t| ChatTop::new(names, t.token_id, t.logprob)).collect();
            Some(ChatToken { own: ChatTop::new(names, token.id, logprob.logprob), top_logprobs: top })
        });
        Self { content: content.collect(), refusal: None }
    }
}

/// vLLM's `prompt_logprobs`: null for the first token, then an object keyed by token id for each further token.
#[derive(Debug)]
pub struct PromptLogprobs(Vec<Option<Vec<PromptEntry>>>);

#[derive(Debug, Serialize)]
struct PromptEntry {
    #[serde(skip)]
    id: u32,
    logprob: f32,
    rank: u32,
    decoded_token: String,
}

impl PromptLogprobs {
    /// The logprobs of a prompt. `logprobs` has one entry for each prompt token except the first.
    pub fn new(model: &ServedModel, prompt: &EncodedPrompt, logprobs: &[TokenLogprob]) -> Self {
        let entry = |id, logprob, rank| {
            let decoded_token = model.token_string(id);
            PromptEntry { id, logprob: finite(logprob), rank, decoded_token }
        };
        let of_token = |(&id, logprob): (&u32, &TokenLogprob)| {
            let others = logprob.top.iter().zip(1u32..).filter(|(top, _)| top.token_id != id);
            let own = entry(id, logprob.logprob, logprob.rank);
            let others = others.map(|(top, rank)| entry(top.token_id, top.logprob, rank));
            Some([own].into_iter().chain(others).collect())
        };
        let rest = prompt.ids.iter().skip(1).zip(logprobs).map(of_token);
        Self([None].into_iter().chain(rest).collect())
    }
}

/// JSON that is written once and sent with several choices.
#[derive(Clone, Debug)]
pub struct Rendered(Arc<RawValue>);

impl Rendered {
    /// Writes a value.
    pub fn new(value: &impl Serialize) -> Self {
        // Serialisation into memory does not fail: all keys are strings, and all numbers are finite.
        let written = to_raw_value(value).unwrap_or_else(|error| {
            tracing::error!(%error, "logprobs do not serialise");
            RawValue::NULL.to_owned()
        });
        Self(written.into())
    }
}

impl Serialize for Rendered {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl Serialize for PromptLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(|token| token.as_deref().map(ByTokenId)))
    }
}

struct ByTokenId<'a>(&'a [PromptEntry]);

impl Serialize for ByTokenId<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for entry in self.0 {
            map.serialize_entry(&entry.id, entry)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests;
