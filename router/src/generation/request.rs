//! A generation as a client asks for it, whichever surface it came through.

use std::time::Duration;

use tutti_proto::cluster::v1::MediaKind;

use crate::text::template::{Message, RenderOptions};

/// One request: its prompts, and how each is to be continued. Fields that are `None` take the checkpoint's default,
/// then OpenAI's.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationRequest {
    /// The served model's name; `None` means the only one.
    pub model: Option<String>,
    /// What to continue; each prompt yields `n` choices.
    pub prompts: Vec<Prompt>,
    /// What stands in the prompt beside text, in its order; only where there is one prompt.
    pub media: Vec<Media>,
    /// Choices a prompt; `None` means 1.
    pub n: Option<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// When a choice ends.
    pub stopping: Stopping,
    /// What is reported beside the text.
    pub output: Output,
    /// Before (below 0) or behind (above 0) ordinary requests, at most `MAX_PRIORITY` away from them.
    pub priority: i32,
    /// How long the client will wait.
    pub timeout: Option<Duration>,
}

/// Something to continue.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text to tokenise.
    Text {
        /// The text.
        text: String,
        /// Whether the tokenizer's own special tokens (a beginning of sequence, say) are put around it.
        add_special_tokens: bool,
    },
    /// Tokens, taken as they are.
    Tokens(Vec<u32>),
    /// A conversation, for the checkpoint's chat template.
    Chat {
        /// The turns so far.
        messages: Vec<Message>,
        /// How the template is asked.
        options: RenderOptions,
        /// Whether special tokens are added to what the template gives.
        add_special_tokens: bool,
    },
}

/// An item of media. The prompt has one of the model's placeholder tokens in its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Media {
    /// Where it is in the request, for errors.
    pub path: String,
    /// What it is.
    pub kind: MediaKind,
    /// As the model's declaration spells it.
    pub format: String,
    /// As the client's.
    pub data: Vec<u8>,
}

/// How tokens are chosen. Ranges are those of `tutti.v1.Sampling`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// 0 keeps all.
    pub top_k: Option<u32>,
    /// Kept probability mass.
    pub top_p: Option<f32>,
    /// Least probability relative to the likeliest token's.
    pub min_p: Option<f32>,
    /// Over prompt and output.
    pub repetition_penalty: Option<f32>,
    /// Over the output.
    pub presence_penalty: Option<f32>,
    /// Over the output, for each time.
    pub frequency_penalty: Option<f32>,
    /// Added to tokens' logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of choice 0; the others' are derived from it.
    pub seed: Option<u64>,
}

/// When a choice ends.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stopping {
    /// `None` takes `default_max_tokens`.
    pub max_tokens: Option<u32>,
    /// What `max_tokens` is when the client does not say; `None` means as much as there is room for.
    pub default_max_tokens: Option<u32>,
    /// No end-of-sequence token, stop token or stop string before this many tokens.
    pub min_tokens: u32,
    /// Strings that end the output.
    pub stop: Vec<String>,
    /// Whether a stop string, or the text of a stop token, stays in the output.
    pub include_stop: bool,
    /// Tokens that end the output.
    pub stop_token_ids: Vec<u32>,
    /// Do not end at the model's end-of-sequence tokens.
    pub ignore_eos: bool,
}

/// What is reported beside the text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Output {
    /// Logprobs of sampled tokens, with this many alternatives.
    pub logprobs: Option<u32>,
    /// Logprobs of prompt tokens, with this many alternatives.
    pub prompt_logprobs: Option<u32>,
    /// The prompt is repeated before the output; with `logprobs`, its tokens' are reported too.
    pub echo: bool,
    /// Special tokens show in the text.
    pub keep_special_tokens: bool,
}

impl Output {
    /// How many alternatives the prompt's logprobs need, for whichever reason they are wanted.
    pub fn prompt_logprobs_needed(&self) -> Option<u32> {
        let echoed = if self.echo { self.logprobs } else { None };
        self.prompt_logprobs.max(echoed)
    }
}
