//! Constraints as requests carry them. Routers check what these messages say, and workers compile it.

use serde_json::Value;
use tutti_proto::{
    cluster::v1 as pb,
    v1::{self, constraint::Kind as Message},
};

use crate::{
    constraint::{Constraint, Kind, Strictness, StructuralTag, Thinking, Whitespace},
    error::ConstraintError,
    limits::MAX_TEXT_BYTES,
    text_bounds::at_most,
};

impl Constraint {
    /// Reads a request's constraint and the thinking block in front of its answer. What the constraint says is checked
    /// by [`Environment::check`](crate::Environment::check).
    pub fn from_message(
        message: v1::Constraint,
        thinking: Option<&pb::Thinking>,
    ) -> Result<Self, ConstraintError> {
        let whitespace = match message.whitespace() {
            // An unknown number is read as the default.
            v1::constraint::Whitespace::Bounded if message.whitespace != 0 => {
                let message = format!("has the unknown whitespace {}", message.whitespace);
                return Err(ConstraintError::at("constraint", message));
            }
            v1::constraint::Whitespace::Bounded => Whitespace::Bounded,
            v1::constraint::Whitespace::Compact => Whitespace::Compact,
            v1::constraint::Whitespace::Any => Whitespace::Any,
        };
        let kind = message.kind.ok_or_else(|| {
            ConstraintError::at("constraint", "is of no kind: one of its kinds is required")
        })?;
        Ok(Self { kind: kind.try_into()?, whitespace, thinking: thinking.into() })
    }
}

impl TryFrom<Message> for Kind {
    type Error = ConstraintError;

    fn try_from(message: Message) -> Result<Self, ConstraintError> {
        Ok(match message {
            Message::JsonObject(_) => Self::JsonObject,
            Message::JsonSchema(v1::JsonSchema { schema, strict }) => Self::JsonSchema {
                schema: read_schema("schema", &schema)?,
                strictness: if strict { Strictness::Strict } else { Strictness::Lenient },
            },
            Message::Regex(pattern) => Self::Regex(pattern),
            Message::Choice(choices) => Self::Choice(choices.texts),
            Message::Lark(grammar) => Self::Lark(grammar),
            Message::StructuralTags(v1::StructuralTags { tags, triggers }) => {
                let bytes = tags.iter().map(|tag| tag.schema.len()).sum();
                at_most("structural_tag", "bytes of schemas", bytes, MAX_TEXT_BYTES)?;
                let tag = |(n, tag): (usize, v1::StructuralTag)| {
                    let path = format!("structural_tag.structures[{n}].schema");
                    let schema = read_schema(&path, &tag.schema)?;
                    Ok(StructuralTag { begin: tag.begin, schema, end: tag.end })
                };
                let tags = tags.into_iter().enumerate().map(tag).collect::<Result<_, _>>()?;
                Self::StructuralTags { tags, triggers }
            }
        })
    }
}

impl From<Option<&pb::Thinking>> for Thinking {
    fn from(message: Option<&pb::Thinking>) -> Self {
        match message {
            None => Self::Closed,
            Some(&pb::Thinking { begin: None, end, .. }) => Self::Open { end },
            Some(&pb::Thinking { begin: Some(begin), end, .. }) => Self::Optional { begin, end },
        }
    }
}

/// Reads a schema. The size of its text bounds the work, and the parser bounds its depth.
fn read_schema(path: &str, text: &str) -> Result<Value, ConstraintError> {
    at_most(path, "bytes of text", text.len(), MAX_TEXT_BYTES)?;
    serde_json::from_str(text)
        .map_err(|error| ConstraintError::of_library(path, format!("is no JSON: {error}")))
}

#[cfg(test)]
mod tests;
