//! Calls whose parameters stand between tags. Their arguments are built: text streams as a JSON string, and values of
//! other types are written once they are whole.

use super::tool_name;
use crate::{
    cursor::{Break, Cursor, Markers, ValueEnd},
    json::escape,
    limits::MAX_HELD,
    output::Output,
    tools::{Tools, Types},
};

/// The tags of a family.
pub(crate) struct Tags {
    /// Markers that may stand between parameters: the openings of a parameter first, then those that end the call.
    pub between: Markers,
    /// Number of the markers in `between` that open a parameter.
    pub openings: usize,
    /// End of a parameter's name.
    pub key_end: Markers,
    /// Attributes between a parameter's name and its value.
    pub attributes: Attributes,
    /// Closing tag of a value.
    pub close: Markers,
    /// Markers that may follow the closing tag of a value.
    pub followers: Markers,
    /// True if values stand on lines of their own.
    pub framed: bool,
}

/// The syntax between a parameter's name and its value.
pub(crate) enum Attributes {
    /// Nothing.
    None,
    /// An opening tag of the value, after white space.
    Opening(Markers),
    /// ` string="true">` for text, and ` string="false">` for JSON, up to this marker. A parameter `arguments` that the
    /// tool does not declare wraps all arguments.
    Typed(Markers),
}

/// Reads a call behind its name, which stands in `header`. Returns the position of its end in [`Tags::between`].
pub(crate) async fn tagged_call(
    cursor: &Cursor,
    tags: &Tags,
    tools: &Tools,
    header: &str,
) -> Result<usize, Break> {
    let name = tool_name(header)?;
    cursor.begin_call(name.clone(), None);
    let end = parameters(cursor, tags, tools, &name).await?;
    cursor.end_call();
    Ok(end)
}

/// Reads the parameters of a call that has begun, and what ends it. Returns the position of the latter in
/// [`Tags::between`].
async fn parameters(cursor: &Cursor, tags: &Tags, tools: &Tools, tool: &str) -> Result<usize, Break> {
    let mut members = Members::default();
    loop {
        cursor.skip_blank().await?;
        // Text between parameters belongs to none of them.
        let marker = cursor.stream_until(&tags.between, Output::text).await?;
        if marker >= tags.openings {
            cursor.arguments(members.close());
            return Ok(marker);
        }
        cursor.keep_marker();
        let (key, _) = cursor.word_until(&tags.key_end).await?;
        let key = key.trim();
        let types = match &tags.attributes {
            Attributes::None => tools.types(tool, key),
            Attributes::Opening(opening) => {
                cursor.skip_blank().await?;
                cursor.next_marker(opening).await.ok_or(Break::Malformed)?;
                tools.types(tool, key)
            }
            Attributes::Typed(end) => match cursor.word_until(end).await?.0.trim() {
                "string=\"true\"" => Types::TEXT,
                "string=\"false\""
                    if members.may_wrap() && key == "arguments" && !tools.has_parameter(tool, key) =>
                {
                    cursor.keep_nothing();
                    members.unwrap(cursor, tags).await?;
                    continue;
                }
                "string=\"false\"" => Types::ANY,
                _ => tools.types(tool, key),
            },
        };
        cursor.keep_nothing();
        cursor.arguments(&members.next(key));
        value(cursor, tags, types).await?;
    }
}

/// Reads one value, and writes it as JSON.
async fn value(cursor: &Cursor, tags: &Tags, types: Types) -> Result<(), Break> {
    let mut held = Held::new(types);
    let ended = cursor.value(tags.value_end(), |output, text| held.add(output, text)).await;
    cursor.output(|output| held.end(output, ended.is_ok()));
    ended
}

impl Tags {
    fn value_end(&self) -> ValueEnd<'_> {
        ValueEnd { close: &self.close, followers: &self.followers, framed: self.framed }
    }
}

/// The JSON object of a call's arguments, as far as it is written.
#[derive(Default)]
struct Members {
    /// True if the opening brace is written.
    is_open: bool,
    /// True if the object has a member.
    is_filled: bool,
}

impl Members {
    /// Text before the value of the next member.
    fn next(&mut self, key: &str) -> String {
        let before = match (self.is_open, self.is_filled) {
            (false, _) => "{",
            (true, false) => "",
            (true, true) => ", ",
        };
        (self.is_open, self.is_filled) = (true, true);
        format!("{before}\"{}\": ", escape(key))
    }

    fn close(&self) -> &'static str {
        if self.is_open { "}" } else { "{}" }
    }

    /// True if the next parameter may be a wrapper of all others.
    fn may_wrap(&self) -> bool {
        !self.is_open
    }

    /// Writes the members of an object instead of the object. Any other value stays the parameter `arguments`.
    async fn unwrap(&mut self, cursor: &Cursor, tags: &Tags) -> Result<(), Break> {
        let before = self.next("arguments");
        let mut held = Held::new(Types::ANY);
        let mut is_kept = false;
        let ended = cursor.value(tags.value_end(), |output, part| {
            if !is_kept && !held.has_room(part) {
                is_kept = true;
                output.arguments(&before);
            }
            held.add(output, part);
        });
        let ended = ended.await;
        if let Some((is_empty, members)) = held.members() {
            cursor.arguments(members);
            self.is_filled = !is_empty;
            return ended;
        }
        cursor.output(|output| {
            output.arguments(if is_kept { "" } else { &before });
            held.end(output, ended.is_ok());
        });
        ended
    }
}

/// A text as JSON of one of these types, or as a string.
fn written(types: Types, text: &str) -> String {
    types.read(text).unwrap_or_else(|| format!("\"{}\"", escape(text)))
}

/// A value on its way: written at once if it is text, else held until it is whole.
enum Held {
    /// A string whose opening quote may have been written.
    Text { is_open: bool },
    /// Text that may be a value of these types.
    Typed { types: Types, text: String },
}

impl Held {
    fn new(types: Types) -> Self {
        if types.is_text() {
            Self::Text { is_open: false }
        } else {
            Self::Typed { types, text: String::new() }
        }
    }

    /// True if the part can be held, too.
    fn has_room(&self, part: &str) -> bool {
        matches!(self, Self::Typed { text, .. } if text.len() + part.len() <= MAX_HELD)
    }

    /// The members of an object, without the closing brace, and whether there are none.
    fn members(&self) -> Option<(bool, &str)> {
        let Self::Typed { text, .. } = self else { return None };
        let object: serde_json::Map<String, serde_json::Value> = serde_json::from_str(text).ok()?;
        Some((object.is_empty(), text.trim().strip_suffix('}')?))
    }

    fn add(&mut self, output: &mut Output, part: &str) {
        match self {
            Self::Text { is_open } => {
                let quote = if *is_open { "" } else { "\"" };
                *is_open = true;
                output.arguments(&format!("{quote}{}", escape(part)));
            }
            Self::Typed { text, .. } => {
                text.push_str(part);
                if text.len() > MAX_HELD {
                    let text = std::mem::take(text);
                    *self = Self::Text { is_open: false };
                    self.add(output, &text);
                }
            }
        }
    }

    /// Writes the end of the value. If the output ends inside it, the value stays open.
    fn end(self, output: &mut Output, is_whole: bool) {
        match self {
            Self::Text { is_open } => {
                output.arguments(if is_open { "" } else { "\"" });
                output.arguments(if is_whole { "\"" } else { "" });
            }
            Self::Typed { types, text } if is_whole => output.arguments(&written(types, &text)),
            Self::Typed { text, .. } => output.arguments(&text),
        }
    }
}
