//! Blocks of reasoning: their markers, and whether the prompt has opened one.

use crate::{choice::Refusal, cursor::Vocabulary};

/// The markers between which a family reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reasoning {
    /// Name, as settings have it.
    pub name: &'static str,
    pub(crate) open: &'static str,
    pub(crate) close: &'static str,
}

/// All kinds. Harmony's reasoning is a channel of the format itself.
const KINDS: [Reasoning; 2] = [
    Reasoning { name: "think", open: "<think>", close: "</think>" },
    Reasoning { name: "mistral", open: "[THINK]", close: "[/THINK]" },
];

/// The state of the block of reasoning where an output begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Block {
    /// The prompt says nothing: the model may open a block.
    #[default]
    Unopened,
    /// The prompt has opened a block: the output begins inside it.
    Open,
    /// The prompt has closed the block: all output is content and calls.
    Closed,
}

impl Reasoning {
    /// The kind that a setting names: `none`, the name of a kind, or `auto` for the one whose markers the chat template
    /// has, if any.
    pub fn choose(setting: &str, template: Option<&str>) -> Result<Option<Self>, Refusal> {
        match setting {
            "none" => Ok(None),
            "auto" => {
                Ok(KINDS.into_iter().find(|kind| template.is_some_and(|text| text.contains(kind.close))))
            }
            name => match KINDS.into_iter().find(|kind| kind.name == name) {
                Some(kind) => Ok(Some(kind)),
                None => Err(Refusal::UnknownReasoning(name.to_owned())),
            },
        }
    }

    /// All names of settings.
    pub fn names() -> impl Iterator<Item = &'static str> {
        ["auto", "none"].into_iter().chain(KINDS.into_iter().map(|kind| kind.name))
    }

    /// The tokens that begin and end a block. `None` if a marker is no token.
    pub fn tokens(&self, vocabulary: &Vocabulary) -> Option<(u32, u32)> {
        Some((vocabulary.id(self.open)?, vocabulary.id(self.close)?))
    }

    /// The state behind a rendered prompt. Only its very end counts, because text of clients may have markers, too.
    pub fn block_after(&self, prompt: &str) -> Block {
        let prompt = prompt.trim_end();
        if prompt.ends_with(self.open) {
            Block::Open
        } else if prompt.ends_with(self.close) {
            Block::Closed
        } else {
            Block::Unopened
        }
    }

    /// The state behind the beginning of a message of the assistant, which the output continues.
    pub fn block_within(&self, message: &str) -> Block {
        match (message.rfind(self.open), message.rfind(self.close)) {
            (None, None) if message.trim().is_empty() => Block::Unopened,
            (Some(open), close) if close.is_none_or(|close| close < open) => Block::Open,
            _ => Block::Closed,
        }
    }
}

#[cfg(test)]
mod tests;
