//! Server-sent events of OpenAI's streams. Events are parsed with as little work as possible, because a load generator
//! often shares its machine with the server that it measures.

use serde::Deserialize;
use serde_json::value::RawValue;

/// Maximum length of a line, in bytes. No server needs longer lines, and a faulty server must not make the generator
/// use all memory.
const MAX_LINE: usize = 64 << 20;

/// Splits a stream of byte chunks into lines. A line may span chunks.
#[derive(Debug, Default)]
pub struct Lines {
    held: Vec<u8>,
    /// Number of bytes at the start of `held` that have been returned as lines.
    read: usize,
}

impl Lines {
    /// Takes the next chunk.
    pub fn push(&mut self, chunk: &[u8]) {
        self.held.drain(..self.read);
        self.read = 0;
        self.held.extend_from_slice(chunk);
    }

    /// Returns the next complete line, or `None` if it has not arrived yet.
    #[expect(
        clippy::should_implement_trait,
        reason = "a line borrows the buffer, which an iterator's item cannot"
    )]
    pub fn next(&mut self) -> Result<Option<&str>, EventError> {
        let rest = &self.held[self.read..];
        let Some(end) = rest.iter().position(|byte| *byte == b'\n') else {
            if rest.len() > MAX_LINE {
                return Err(EventError::Malformed(format!("a line is longer than {MAX_LINE} bytes")));
            }
            return Ok(None);
        };
        self.read += end + 1;
        let line = rest[..end].strip_suffix(b"\r").unwrap_or(&rest[..end]);
        let text = std::str::from_utf8(line);
        text.map(Some).map_err(|e| EventError::Malformed(format!("a line is no text: {e}")))
    }
}

/// The part of the answer that an event of a stream adds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delta {
    /// Number of new tokens. A server that sends no token ids is assumed to send one token per event with text.
    pub tokens: u32,
    /// The server's count, in a stream's last event.
    pub usage: Option<Usage>,
}

/// A server's count of a request's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Usage {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
}

/// An event that is not part of a served answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EventError {
    /// The server reports that the request failed.
    #[error("error in the stream: {0}")]
    Server(String),
    /// The event cannot be read.
    #[error("{0}")]
    Malformed(String),
}

#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    #[serde(borrow, default)]
    choices: Vec<Choice<'a>>,
    usage: Option<Usage>,
}

/// A choice of an answer. In the completions API it has `text`, in the chat API `delta`.
#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    text: Option<&'a RawValue>,
    #[serde(borrow, default)]
    delta: Option<Message<'a>>,
    token_ids: Option<Vec<u32>>,
}

/// The fields of a chat's delta that hold generated tokens, under the names that servers use.
#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    reasoning_content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    reasoning: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tool_calls: Option<&'a RawValue>,
}

/// Reads the data of an event.
pub fn parse(event: &str) -> Result<Delta, EventError> {
    let event: Event<'_> = serde_json::from_str(event)
        .map_err(|e| EventError::Malformed(format!("an event is not as OpenAI's API has it: {e}")))?;
    if let Some(error) = event.error {
        return Err(EventError::Server(error.get().to_owned()));
    }
    let tokens = event.choices.first().map_or(0, Choice::tokens);
    Ok(Delta { tokens, usage: event.usage })
}

impl Choice<'_> {
    fn tokens(&self) -> u32 {
        let filled =
            |value: Option<&RawValue>| value.is_some_and(|v| !matches!(v.get(), "\"\"" | "null" | "[]"));
        // An event may carry the last text after the last token. Its list of ids is then empty.
        if let Some(ids) = &self.token_ids {
            return ids.len() as u32;
        }
        let said = self.delta.as_ref().is_some_and(|delta| {
            [delta.content, delta.reasoning_content, delta.reasoning, delta.tool_calls]
                .into_iter()
                .any(filled)
        });
        u32::from(said || filled(self.text))
    }
}

#[cfg(test)]
mod tests;
