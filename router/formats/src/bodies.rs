//! Forms of calls that several families share: a JSON object with a name, a name before JSON, and tagged parameters.

mod json;
mod tagged;

pub(crate) use self::{
    json::{ObjectRules, arguments, json_call, object},
    tagged::{Attributes, Tags, tagged_call},
};
use crate::cursor::Break;

/// A tool's name as a format writes it, or no call: a name is one word.
pub(crate) fn tool_name(text: &str) -> Result<String, Break> {
    let name = text.trim();
    let is_word = !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || c.is_control());
    if is_word { Ok(name.to_owned()) } else { Err(Break::Malformed) }
}
