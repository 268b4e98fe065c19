//! A request's constraint as plain data.

use std::fmt::Write;

use serde_json::Value;

/// A constraint of the text that a request generates.
#[derive(Clone, Debug, PartialEq)]
pub struct Constraint {
    /// The language that the answer follows.
    pub kind: Kind,
    /// White space between the tokens of JSON.
    pub whitespace: Whitespace,
    /// The thinking block in front of the answer. The constraint does not hold inside it.
    pub thinking: Thinking,
}

impl Constraint {
    /// A constraint of the whole output, with bounded white space.
    pub fn new(kind: Kind) -> Self {
        Self { kind, whitespace: Whitespace::Bounded, thinking: Thinking::Closed }
    }

    /// True if the constraint may name tokens by their ids, as grammars of tool calls name their markers. Its masks
    /// need the vocabulary of [`Vocabulary::with_added_special`](crate::Vocabulary::with_added_special).
    pub fn names_tokens(&self) -> bool {
        matches!(&self.kind, Kind::Lark(grammar) if grammar.contains("<["))
    }

    /// The canonical form. Two constraints with equal forms have equal masks.
    pub fn canonical(&self) -> Canonical {
        let mut text = format!("{:?} {:?} ", self.whitespace, self.thinking);
        // Writing to a string cannot fail.
        let _ = match &self.kind {
            Kind::JsonObject => write!(text, "json_object"),
            // The order of members decides the order in the output, so it is part of the form.
            Kind::JsonSchema { schema, .. } => write!(text, "json_schema {schema}"),
            Kind::Regex(pattern) => write!(text, "regex {pattern}"),
            Kind::Choice(choices) => write!(text, "choice {choices:?}"),
            Kind::Lark(grammar) => write!(text, "lark {grammar}"),
            Kind::StructuralTags { tags, triggers } => {
                let tags: Vec<_> =
                    tags.iter().map(|tag| (&tag.begin, tag.schema.to_string(), &tag.end)).collect();
                write!(text, "structural_tags {triggers:?} {tags:?}")
            }
        };
        Canonical(text.into())
    }
}

/// The language that an answer follows.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// Any JSON object.
    JsonObject,
    /// A JSON document that is valid against a schema.
    JsonSchema {
        /// The schema.
        schema: Value,
        /// The rules that the schema itself has to follow.
        strictness: Strictness,
    },
    /// A text that a regular expression matches from its beginning to its end.
    Regex(String),
    /// One of several texts.
    Choice(Vec<String>),
    /// A grammar in the Lark dialect of llguidance.
    Lark(String),
    /// Free text in which certain tags hold JSON.
    StructuralTags {
        /// The tags.
        tags: Vec<StructuralTag>,
        /// Texts that begin a tag. Each tag begins with one of them.
        triggers: Vec<String>,
    },
}

/// A tag whose content is JSON.
#[derive(Clone, Debug, PartialEq)]
pub struct StructuralTag {
    /// The text before the content.
    pub begin: String,
    /// The schema of the content.
    pub schema: Value,
    /// The text behind the content.
    pub end: String,
}

/// The rules that a schema itself follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strictness {
    /// The schema is taken as it is.
    Lenient,
    /// The rules of OpenAI's strict mode: objects are closed, and all their members are required.
    Strict,
}

/// White space between the tokens of JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Whitespace {
    /// None.
    Compact,
    /// At most eight characters at a time. A model that wants to write on behind a closing quote has nothing but white
    /// space left, and without a bound it would fill `max_tokens` with it.
    #[default]
    Bounded,
    /// Any amount.
    Any,
}

/// The thinking block in front of an answer, as far as the prompt does not hold it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Thinking {
    /// No block: the answer begins with the first token.
    #[default]
    Closed,
    /// The prompt has opened the block.
    Open {
        /// The token that ends the block.
        end: u32,
    },
    /// The model may open the block with its first token.
    Optional {
        /// The token that begins the block.
        begin: u32,
        /// The token that ends the block.
        end: u32,
    },
}

/// The canonical form of a constraint, a key by content. Maps compare the content itself, because callers could
/// construct two contents with one hash.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Canonical(std::sync::Arc<str>);

impl Canonical {
    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests;
