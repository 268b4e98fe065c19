//! The turns of a conversation, in the shapes that templates read.

use minijinja::{Value, context, value::Serde};
use tutti_proto::cluster::v1::MediaKind;

use super::python;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user`, `assistant`, or another role that the template knows.
    pub role: String,
    /// The text and the media.
    pub content: Content,
    /// Name of the speaker, for templates that show it.
    pub name: Option<String>,
    /// The reasoning in front of an assistant's text. The template decides whether it shows it.
    pub reasoning: Option<String>,
    /// The tool calls of an assistant's message.
    pub calls: Vec<ToolCall>,
    /// The id of the call whose result the message is.
    pub call_id: Option<String>,
}

/// A tool call of an earlier turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The client's id, which templates show as it is.
    pub id: Option<String>,
    /// Name of the tool.
    pub name: String,
    /// The arguments. Templates iterate over them, or write them as JSON.
    pub arguments: serde_json::Map<String, serde_json::Value>,
}

/// A shape of the arguments of calls that templates read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ArgumentShape {
    /// An object.
    #[default]
    Object,
    /// The JSON of an object, as a text.
    Json,
}

impl ToolCall {
    fn value(&self, shape: ArgumentShape) -> Value {
        let arguments = match shape {
            ArgumentShape::Object => Value::from(Serde(&self.arguments)),
            ArgumentShape::Json => Value::from(python::json(&self.arguments)),
        };
        let function = context! { name => self.name.as_str(), arguments };
        match &self.id {
            Some(id) => context! { id => id.as_str(), type => "function", function },
            None => context! { type => "function", function },
        }
    }
}

/// Content of a message, as the client gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// A text.
    Text(String),
    /// A list of parts.
    List(Vec<ContentPart>),
}

/// A part of a message's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContentPart {
    /// A text.
    Text(String),
    /// A media item. `placeholder` is the text that stands for it; empty until the model's own is known.
    Media { kind: MediaKind, placeholder: String },
}

/// A shape of content that templates read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// One text. Adjacent text parts become lines.
    Text,
    /// A list of one text part, which has the lines of all.
    OnePart,
    /// A list of text parts.
    List,
}

impl Message {
    /// A message with nothing but a text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: Content::Text(content.into()),
            name: None,
            reasoning: None,
            calls: Vec::new(),
            call_id: None,
        }
    }

    /// The message as a template reads it. `sentinels` are the kinds of media for which the template writes sentinels
    /// and placeholders itself. Media of other kinds are texts: their placeholders.
    pub fn shaped(&self, shape: Shape, arguments: ArgumentShape, sentinels: &[MediaKind]) -> Value {
        let part = |text: &str| context! { type => "text", text => text };
        let any_part = |one: &ContentPart| match one {
            ContentPart::Media { kind, .. } if sentinels.contains(kind) => {
                // The names in the templates that transformers publish.
                context! { type => kind.as_str_name().to_lowercase() }
            }
            one => part(one.shown()),
        };
        let content = match (shape, &self.content) {
            (Shape::Text, content) => Value::from(content.joined()),
            (Shape::OnePart, content) => Value::from(vec![part(&content.joined())]),
            (Shape::List, Content::Text(text)) => Value::from(vec![part(text)]),
            (Shape::List, Content::List(parts)) => parts.iter().map(any_part).collect::<Value>(),
        };
        let mut members = vec![("role", Value::from(self.role.as_str())), ("content", content)];
        members.extend(self.name.as_deref().map(|name| ("name", Value::from(name))));
        if let Some(reasoning) = self.reasoning.as_deref() {
            members.extend(["reasoning_content", "reasoning"].map(|key| (key, Value::from(reasoning))));
            // Harmony's template has one of the two in a message with calls, and refuses both.
            if self.content.is_empty() {
                members.push(("thinking", Value::from(reasoning)));
            }
        }
        if !self.calls.is_empty() {
            members.push(("tool_calls", self.calls.iter().map(|call| call.value(arguments)).collect()));
        }
        members.extend(self.call_id.as_deref().map(|id| ("tool_call_id", Value::from(id))));
        Value::from_pairs(members)
    }
}

impl Content {
    /// The texts, without placeholders.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let (one, parts) = match self {
            Self::Text(text) => (Some(text.as_str()), &[][..]),
            Self::List(parts) => (None, parts.as_slice()),
        };
        one.into_iter().chain(parts.iter().filter_map(|part| match part {
            ContentPart::Text(text) => Some(text.as_str()),
            ContentPart::Media { .. } => None,
        }))
    }

    /// The texts, without placeholders.
    pub fn texts_mut(&mut self) -> impl Iterator<Item = &mut String> {
        let (one, parts) = match self {
            Self::Text(text) => (Some(text), &mut [][..]),
            Self::List(parts) => (None, parts.as_mut_slice()),
        };
        one.into_iter().chain(parts.iter_mut().filter_map(|part| match part {
            ContentPart::Text(text) => Some(text),
            ContentPart::Media { .. } => None,
        }))
    }

    /// True if there is neither text nor media.
    fn is_empty(&self) -> bool {
        match self {
            Self::Text(text) => text.is_empty(),
            Self::List(parts) => parts.is_empty(),
        }
    }

    /// The text at the end; `None` if the end is a media item, or nothing.
    pub fn last_text_mut(&mut self) -> Option<&mut String> {
        match self {
            Self::Text(text) => Some(text),
            Self::List(parts) => match parts.last_mut()? {
                ContentPart::Text(text) => Some(text),
                ContentPart::Media { .. } => None,
            },
        }
    }

    /// All parts as one text, with adjacent texts on separate lines.
    fn joined(&self) -> String {
        let parts = match self {
            Self::Text(text) => return text.clone(),
            Self::List(parts) => parts,
        };
        let (mut joined, mut after_text) = (String::new(), false);
        for part in parts {
            let is_text = matches!(part, ContentPart::Text(_));
            joined.push_str(if is_text && after_text { "\n" } else { "" });
            joined.push_str(part.shown());
            after_text = is_text;
        }
        joined
    }
}

impl ContentPart {
    /// The text of the part, or the placeholder.
    fn shown(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Media { placeholder, .. } => placeholder,
        }
    }
}
