//! The end of one choice.

/// The end of a choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// The reason for the end.
    pub reason: Reason,
    /// Number of generated tokens, including tokens whose text was cut off with a stop string.
    pub generated: u32,
    /// Number of prompt tokens from the prefix cache.
    pub cached_tokens: u32,
    /// Number of tokens of the reasoning, with its markers. `None` if the answer is not read into parts.
    pub reasoning_tokens: Option<u32>,
    /// The tool calls of the answer.
    pub calls: CallCounts,
}

impl Finish {
    /// The words of OpenAI's `finish_reason`.
    pub const WORDS: [&str; 3] = ["stop", "length", "tool_calls"];

    /// The word for the end in OpenAI's `finish_reason`. A limit that cuts a call is a limit.
    pub fn word(&self) -> &'static str {
        let [stop, length, tool_calls] = Self::WORDS;
        match self.reason {
            Reason::Length => length,
            _ if self.calls.all > 0 => tool_calls,
            _ => stop,
        }
    }
}

/// Numbers of tool calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallCounts {
    /// All calls.
    pub all: u32,
    /// Calls of tools that the request does not declare.
    pub undeclared: u32,
}

/// The reason that a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The model's end-of-sequence token.
    EndOfSequence,
    /// One of the request's stop tokens.
    StopToken(u32),
    /// One of the request's stop strings.
    StopString(String),
    /// `max_tokens` or the context's length was reached.
    Length,
    /// The answer has its only call, because the request wants no parallel ones.
    OnlyCall,
}
