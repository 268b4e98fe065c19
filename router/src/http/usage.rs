//! OpenAI's `usage`.

use serde::Serialize;

use super::parameters::StreamOptions;
use crate::generation::{self, Delta, GenerationInfo};

/// Numbers of a request's prompt and output tokens.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Usage {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    /// Absent before the end of an answer, because only then the tokens from the prefix cache are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens_details: Option<PromptDetails>,
    /// Absent before the end of an answer, and from models that do not reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens_details: Option<CompletionDetails>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct PromptDetails {
    cached_tokens: u32,
    /// Absent without media of the kind, as are the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    audio_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    image_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    video_tokens: Option<u32>,
}

impl From<generation::Usage> for PromptDetails {
    fn from(generation::Usage { cached_tokens, media, .. }: generation::Usage) -> Self {
        let [audio_tokens, image_tokens, video_tokens] =
            [media.audio, media.image, media.video].map(|tokens| (tokens > 0).then_some(tokens));
        Self { cached_tokens, audio_tokens, image_tokens, video_tokens }
    }
}

#[derive(Clone, Copy, Debug, Serialize)]
struct CompletionDetails {
    reasoning_tokens: u32,
}

impl From<generation::Usage> for Usage {
    fn from(usage: generation::Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details: Some(usage.into()),
            completion_tokens_details: usage
                .reasoning_tokens
                .map(|reasoning_tokens| CompletionDetails { reasoning_tokens }),
        }
    }
}

/// The `usage` of the chunks of a stream.
#[derive(Debug, Default)]
pub struct StreamUsage {
    options: StreamOptions,
    /// Output tokens so far, by choice.
    tokens: Vec<u32>,
}

impl StreamUsage {
    /// Creates the counts of a stream; `None` as options if the answer is not streamed.
    pub fn new(options: Option<StreamOptions>, choices: usize) -> Self {
        Self { options: options.unwrap_or_default(), tokens: vec![0; choices] }
    }

    /// True if a last chunk reports the usage.
    pub fn at_the_end(&self) -> bool {
        self.options.include_usage
    }

    /// The `usage` of a chunk: absent unless the client requested it, and null unless it is to be in every chunk.
    pub fn of_chunk(&mut self, info: &GenerationInfo, delta: &Delta) -> Option<Option<Usage>> {
        if !self.options.include_usage {
            return None;
        }
        let choice = delta.choice as usize;
        let tokens = self.tokens.get_mut(choice)?;
        *tokens += delta.tokens.len() as u32;
        let prompt_tokens = info.prompt_of(delta.choice).ids.len() as u32;
        Some(self.options.continuous_usage_stats.then_some(Usage {
            prompt_tokens,
            completion_tokens: *tokens,
            total_tokens: prompt_tokens + *tokens,
            prompt_tokens_details: None,
            completion_tokens_details: None,
        }))
    }
}
