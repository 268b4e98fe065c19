//! A client's request for a generation, independent of the surface (HTTP or gRPC).

use std::time::Duration;

use reqwest::Url;
use tutti_proto::{
    cluster::v1::MediaKind,
    v1::{Constraint, Sampling},
};

use super::{conversation::Conversation, reading::Reading};
use crate::{keys::ClientSalt, text::pool::Lane};

/// One request. Fields that are `None` take the checkpoint's default, or OpenAI's default if the checkpoint has none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationRequest {
    /// Name of the requested model; `None` means the served model.
    pub model: Option<String>,
    /// Prompts to continue. Each prompt gets `n` choices.
    pub prompts: Vec<Prompt>,
    /// Media items of the prompt, in order. Allowed with a single prompt only.
    pub media: Vec<Media>,
    /// Choices per prompt; `None` means 1.
    pub n: Option<u32>,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Conditions that end a choice.
    pub stopping: Stopping,
    /// Outputs besides the text.
    pub output: Output,
    /// Order in the queue: requests with lower values run earlier. 0 is the default.
    pub priority: i32,
    /// Time that the client waits; `None` means no limit.
    pub timeout: Option<Duration>,
    /// The client's salt of cached prefixes; `None` if it gives none.
    pub cache_salt: Option<ClientSalt>,
    /// The language that the answer follows; `None` for any text.
    pub constraint: Option<Constraint>,
    /// How the answer is read into reasoning, content and calls; `None` if it is one text.
    pub reading: Option<Reading>,
}

/// Approximate bytes per token of an ordinary text.
const BYTES_PER_TOKEN: usize = 4;

/// A prompt to continue.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text to tokenise.
    Text {
        /// The text.
        text: String,
        /// True if the tokenizer adds its special tokens, such as a beginning of sequence.
        add_special_tokens: bool,
    },
    /// Token ids, used unchanged.
    Tokens(Vec<u32>),
    /// A conversation that the checkpoint's chat template renders.
    Chat {
        /// The conversation.
        conversation: Conversation,
        /// True if the tokenizer adds its special tokens to the rendered text.
        add_special_tokens: bool,
    },
}

impl Prompt {
    /// Size of the text in bytes; 0 for token ids. The size of a chat is the sum of its messages, without the text of
    /// the chat template.
    pub fn text_bytes(&self) -> usize {
        match self {
            Self::Text { text, .. } => text.len(),
            Self::Tokens(_) => 0,
            Self::Chat { conversation, .. } => conversation.text_bytes(),
        }
    }

    /// Number of tokens: exact for token ids, estimated from the size of a text.
    pub fn estimate_tokens(&self) -> u64 {
        match self {
            Self::Tokens(ids) => ids.len() as u64,
            _ => self.text_bytes().div_ceil(BYTES_PER_TOKEN) as u64,
        }
    }

    /// The pool's lane for work on this prompt alone.
    pub fn lane(&self) -> Lane {
        match self {
            Self::Tokens(_) => Lane::Parse,
            _ => Lane::of_text(self.text_bytes()),
        }
    }
}

/// A media item, as the client has sent it. The prompt has one placeholder token of the model for each item.
#[derive(Clone, Debug, PartialEq)]
pub struct Media {
    /// Path of the item in the request, for errors.
    pub path: String,
    /// Kind of the item, such as audio.
    pub kind: MediaKind,
    /// Format, as the client or the model's declaration spells it.
    pub format: String,
    /// The item's content: one file, or one for each frame of a video. Empty while the item has a URL.
    pub data: Vec<Vec<u8>>,
    /// URL of the file, which is fetched before the item is decoded; `None` if the request has the data.
    pub url: Option<Url>,
    /// Frames per second of a video; `None` if the client does not say.
    pub fps: Option<f64>,
    /// Detail in which a picture is read.
    pub detail: Detail,
    /// True for the sound of the video that is the item before. Their tokens take turns, and the sound has no
    /// placeholder.
    pub is_sound_of_video: bool,
}

/// Detail in which a picture is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Detail {
    /// All that the model takes.
    #[default]
    Full,
    /// At most 512 times 512 pixels.
    Low,
}

/// Conditions that end a choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stopping {
    /// Maximum number of output tokens; `None` means `default_max_tokens`.
    pub max_tokens: Option<u32>,
    /// Default of `max_tokens`; `None` means as many as the limit per request allows.
    pub default_max_tokens: Option<u32>,
    /// Minimum number of output tokens before an end-of-sequence token, stop token or stop string may end the output.
    pub min_tokens: u32,
    /// Strings that end the output.
    pub stop: Vec<String>,
    /// True if a stop string, or the text of a stop token, stays in the output.
    pub include_stop: bool,
    /// Tokens that end the output.
    pub stop_token_ids: Vec<u32>,
    /// True if the model's end-of-sequence tokens do not end the output.
    pub ignore_eos: bool,
}

/// Outputs besides the text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Output {
    /// Number of alternatives reported with each sampled token's logprob; `None` reports no logprobs.
    pub logprobs: Option<u32>,
    /// Number of alternatives reported with each prompt token's logprob; `None` reports no logprobs.
    pub prompt_logprobs: Option<u32>,
    /// True if the prompt is repeated before the output. With `logprobs`, the prompt's logprobs are reported as well.
    pub echo: bool,
    /// True if special tokens are shown in the text.
    pub keep_special_tokens: bool,
}

impl Output {
    /// Number of alternatives needed with the prompt's logprobs; `None` if neither `prompt_logprobs` nor an echo needs
    /// logprobs of the prompt.
    pub fn prompt_logprobs_needed(&self) -> Option<u32> {
        let echoed = if self.echo { self.logprobs } else { None };
        self.prompt_logprobs.max(echoed)
    }
}
