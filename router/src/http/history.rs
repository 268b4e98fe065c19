//! Tool calls and their results in the messages of a conversation.

use std::collections::HashSet;

use serde_json::{Map, Value, value::RawValue};
use tutti_runtime::Error;

use super::{
    fields::{self, Fields},
    json_values::ValueCount,
};
use crate::text::template::ToolCall;

/// Maximum number of calls in a message.
const MAX_CALLS: usize = 128;
/// Maximum size in bytes of the JSON of all calls of a conversation.
const MAX_CALL_BYTES: usize = 4 << 20;
/// Maximum number of values in the arguments of all calls of a conversation.
const MAX_CALL_VALUES: usize = 64 << 10;
/// Key of arguments that are no JSON, because the output that wrote them was cut. The conversation goes on with their
/// text.
const CUT_ARGUMENTS: &str = "arguments";

/// The calls of the messages so far.
#[derive(Debug)]
pub struct History {
    ids: HashSet<String>,
    /// Values in their arguments.
    values: ValueCount,
    /// Number of calls.
    pub calls: usize,
    /// Size of their JSON in bytes.
    pub bytes: usize,
}

impl Default for History {
    fn default() -> Self {
        Self { ids: HashSet::new(), values: ValueCount::up_to(MAX_CALL_VALUES), calls: 0, bytes: 0 }
    }
}

impl History {
    /// Takes `tool_calls` of an assistant's message.
    pub fn take_calls(&mut self, fields: &mut Fields<'_>, role: &str) -> Result<Vec<ToolCall>, Error> {
        let path = fields.name("tool_calls");
        let given: Vec<&RawValue> = fields.take_list("tool_calls", MAX_CALLS)?.unwrap_or_default();
        if role != "assistant" && !given.is_empty() {
            let message =
                format!("is given in a message of the role {role:?}, but only an assistant calls tools");
            return Err(Error::invalid(path, message));
        }
        self.bytes += given.iter().map(|call| call.get().len()).sum::<usize>();
        if self.bytes > MAX_CALL_BYTES {
            let message = format!(
                "of all messages up to this one have {} bytes, but may have at most {MAX_CALL_BYTES}",
                self.bytes
            );
            return Err(Error::invalid(path, message));
        }
        self.calls += given.len();
        let calls = given.into_iter().enumerate();
        calls.map(|(index, value)| self.call(&format!("{path}[{index}]"), value)).collect()
    }

    fn call(&mut self, path: &str, value: &RawValue) -> Result<ToolCall, Error> {
        let mut fields = Fields::of_value(path, value)?;
        let id: Option<String> = fields.take("id")?;
        self.ids.extend(id.clone());
        let function: &RawValue = fields.require("function")?;
        let mut function = Fields::of_value(&fields.name("function"), function)?;
        let name: String = function.require("name")?;
        if name.is_empty() {
            return Err(Error::invalid(function.name("name"), "is empty"));
        }
        let path = function.name("arguments");
        let arguments = match function.take_raw("arguments") {
            Some(value) => self.arguments(&path, value)?,
            None => Map::new(),
        };
        Ok(ToolCall { id, name, arguments })
    }

    /// Reads arguments: an object, or its JSON as a text.
    fn arguments(&mut self, path: &str, value: &RawValue) -> Result<Map<String, Value>, Error> {
        let not_an_object = || Error::invalid(path, "is no JSON object");
        if !value.get().starts_with('"') {
            self.values.add(path, value.get())?;
            return fields::parse(path, value).map_err(|_| not_an_object());
        }
        let text: String = fields::parse(path, value)?;
        if text.trim().is_empty() {
            return Ok(Map::new());
        }
        // The first reading keeps no values, so that text is neither counted nor kept as values up to its fault.
        let is_json = serde_json::from_str::<&RawValue>(&text).is_ok();
        if is_json {
            self.values.add(path, &text)?;
        }
        match is_json.then(|| serde_json::from_str(&text)) {
            Some(Ok(Value::Object(arguments))) => Ok(arguments),
            Some(Ok(Value::Null)) => Ok(Map::new()),
            Some(Ok(_)) => Err(not_an_object()),
            // Text that nests too deeply is read as text, too.
            Some(Err(_)) | None => Ok(Map::from_iter([(CUT_ARGUMENTS.to_owned(), Value::String(text))])),
        }
    }

    /// Takes `tool_call_id`: the id of an earlier call, in any form. An empty one says nothing.
    pub fn take_call_id(&self, fields: &mut Fields<'_>) -> Result<Option<String>, Error> {
        let path = fields.name("tool_call_id");
        let given: Option<String> = fields.take("tool_call_id")?;
        let Some(id) = given.filter(|id| !id.is_empty()) else { return Ok(None) };
        if !self.ids.contains(&id) {
            let message =
                format!("is {id:?}, but none of the {} calls in earlier messages has this id", self.calls);
            return Err(Error::invalid(path, message));
        }
        Ok(Some(id))
    }
}

#[cfg(test)]
mod tests;
