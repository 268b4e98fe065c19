//! Ends a prompt inside its last message, as Hugging Face's transformers do.
//!
//! A mark is appended to the message before it is rendered, and the prompt ends at the mark. The mark is the one of
//! transformers, so that templates whose output depends on the end of a text, such as its last character, render the
//! same.

use tutti_runtime::Error;

use super::{
    message::Message,
    python::{is_space, strip},
};

const MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// A conversation whose last message has a mark at its end.
pub struct Marked {
    /// The message's text without the mark.
    last: String,
    /// Occurrences of the mark's word in the texts of clients.
    marks: usize,
}

impl Marked {
    /// Appends the mark to the last message.
    pub fn mark(messages: &mut [Message]) -> Result<Self, Error> {
        let refused = |message| Err(Error::invalid("continue_final_message", message));
        let Some(content) = messages.last_mut().map(|message| &mut message.content) else {
            return refused("needs a message");
        };
        let Some(text) = content.last_text_mut() else {
            return refused("needs a last message that ends with a text");
        };
        let last = text.clone();
        text.push_str(MARK);
        let texts = messages.iter().flat_map(|message| message.content.texts());
        Ok(Self { last, marks: texts.map(count).sum() })
    }

    /// Cuts a rendered prompt at the mark.
    pub fn cut(self, text: &mut String) -> Result<(), Error> {
        let at = text.rfind(MARK.trim_end()).filter(|_| text.contains(strip(&self.last)));
        let at = at.filter(|_| count(text) <= self.marks);
        let Some(at) = at else {
            let message =
                "the chat template does not show the last message as it is, so it cannot be continued";
            return Err(Error::invalid("continue_final_message", message));
        };
        let keeps_space = text[at..].starts_with(MARK);
        text.truncate(at);
        if !keeps_space {
            text.truncate(text.trim_end_matches(is_space).len());
        }
        Ok(())
    }
}

fn count(text: &str) -> usize {
    text.matches(MARK.trim_end()).count()
}
