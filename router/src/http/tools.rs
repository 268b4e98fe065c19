//! `tools`, `tool_choice` and `parallel_tool_calls`.

use std::sync::Arc;

use serde_json::{Map, Value, value::RawValue};
use tutti_formats::{CallLimit, NAME_CHARS, is_name_char};
use tutti_runtime::Error;

use super::{
    fields::{self, Fields},
    json_values::ValueCount,
};
use crate::generation::{Tool, ToolChoice};

/// Maximum number of tools, as in OpenAI's API.
const MAX_TOOLS: usize = 128;
/// Maximum size in bytes of the JSON of all tools.
const MAX_TOOL_BYTES: usize = 1 << 20;
/// Maximum number of values in the JSON of all tools.
const MAX_TOOL_VALUES: usize = 64 << 10;
/// Maximum length of a tool's name.
const MAX_NAME_BYTES: usize = 128;

/// The tools of a request.
#[derive(Debug, Default)]
pub struct GivenTools {
    /// The tools, as the client declares them, for the chat template.
    pub shown: Vec<Value>,
    /// The tools, as answers are read and constrained by them.
    pub tools: Vec<Tool>,
    /// Size of their JSON in bytes.
    pub bytes: usize,
}

/// Takes `tools`.
pub fn take(fields: &mut Fields<'_>) -> Result<GivenTools, Error> {
    let mut given = GivenTools::default();
    let name = fields.name("tools");
    let list: Vec<&RawValue> = fields.take_list("tools", MAX_TOOLS)?.unwrap_or_default();
    given.bytes = list.iter().map(|tool| tool.get().len()).sum();
    if given.bytes > MAX_TOOL_BYTES {
        let message = format!("have {} bytes, but may have at most {MAX_TOOL_BYTES}", given.bytes);
        return Err(Error::invalid(name, message));
    }
    let mut values = ValueCount::up_to(MAX_TOOL_VALUES);
    for (index, value) in list.into_iter().enumerate() {
        let path = format!("{name}[{index}]");
        values.add(&path, value.get())?;
        let tool = tool(&path, value)?;
        if let Some(earlier) = given.tools.iter().position(|earlier| earlier.name == tool.name) {
            let message =
                format!("is {:?}, the name of {name}[{earlier}]; names of tools must differ", tool.name);
            return Err(Error::invalid(format!("{path}.function.name"), message));
        }
        given.tools.push(tool);
        given.shown.push(fields::parse(&path, value)?);
    }
    Ok(given)
}

/// Reads a tool. Members that are not known are the template's.
fn tool(path: &str, value: &RawValue) -> Result<Tool, Error> {
    let mut fields = Fields::of_value(path, value)?;
    let kind: Option<String> = fields.take("type")?;
    if let Some(kind) = kind.filter(|kind| kind != "function") {
        let message = format!("is {kind:?}, but tools are functions: \"function\"");
        return Err(Error::invalid(fields.name("type"), message));
    }
    let function: &RawValue = fields.require("function")?;
    let path = fields.name("function");
    let mut function = Fields::of_value(&path, function)?;
    let name: String = function.require("name")?;
    check_name(&function.name("name"), &name)?;
    let _: Option<String> = function.take("description")?;
    let strict: Option<bool> = function.take("strict")?;
    let parameters = function.name("parameters");
    let schema =
        function.take_raw("parameters").map(|schema| self::parameters(&parameters, schema)).transpose()?;
    Ok(Tool { name, parameters: schema.map(Arc::new), is_strict: strict == Some(true) })
}

/// Refuses a name that a format could not carry.
fn check_name(path: &str, name: &str) -> Result<(), Error> {
    let bytes = name.len();
    if bytes > MAX_NAME_BYTES {
        let message = format!("has {bytes} bytes, but may have at most {MAX_NAME_BYTES}");
        return Err(Error::invalid(path, message));
    }
    if name.is_empty() {
        return Err(Error::invalid(path, "is empty"));
    }
    match name.chars().find(|c| !is_name_char(*c)) {
        Some(c) => {
            let message = format!("is {name:?}, but {c:?} is none of letters, digits and {NAME_CHARS}");
            Err(Error::invalid(path, message))
        }
        None => Ok(()),
    }
}

/// Reads the schema of a tool's arguments, which are an object. The keywords inside it are not checked here.
fn parameters(path: &str, value: &RawValue) -> Result<Map<String, Value>, Error> {
    let schema: Value = fields::parse(path, value)?;
    let Value::Object(schema) = schema else {
        return Err(Error::invalid(path, "is no JSON schema of an object"));
    };
    match schema.get("type") {
        None => {}
        Some(Value::String(kind)) if kind == "object" => {}
        Some(other) => {
            let message = format!("is {other}, but arguments are an object: \"object\"");
            return Err(Error::invalid(format!("{path}.type"), message));
        }
    }
    match schema.get("properties") {
        None | Some(Value::Object(_)) => {}
        Some(_) => return Err(Error::invalid(format!("{path}.properties"), "is no object of schemas")),
    }
    let is_schema = |schema: &Value| matches!(schema, Value::Object(_) | Value::Bool(_));
    let mut properties = schema.get("properties").and_then(Value::as_object).into_iter().flatten();
    match properties.find(|(_, property)| !is_schema(property)) {
        Some((name, _)) => Err(Error::invalid(format!("{path}.properties.{name}"), "is no JSON schema")),
        None => Ok(schema),
    }
}

/// Takes `tool_choice`.
pub fn choice(fields: &mut Fields<'_>, tools: &[Tool]) -> Result<ToolChoice, Error> {
    let path = fields.name("tool_choice");
    let Some(value) = fields.take_raw("tool_choice") else { return Ok(ToolChoice::Auto) };
    let choice = if value.get().starts_with('"') {
        match fields::parse::<String>(&path, value)?.as_str() {
            "none" => ToolChoice::None,
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            other => {
                let message =
                    format!("is {other:?}; there are \"none\", \"auto\", \"required\" and a function's name");
                return Err(Error::invalid(path, message));
            }
        }
    } else {
        ToolChoice::Named(named(&path, value, tools)?)
    };
    match choice {
        ToolChoice::Required if tools.is_empty() => {
            Err(Error::invalid(path, "is \"required\", but there are no tools"))
        }
        choice => Ok(choice),
    }
}

/// Reads `{"type": "function", "function": {"name": …}}`. Returns the tool's index.
fn named(path: &str, value: &RawValue, tools: &[Tool]) -> Result<usize, Error> {
    let mut fields = Fields::of_value(path, value)?;
    let kind: Option<String> = fields.take("type")?;
    if let Some(kind) = kind.filter(|kind| kind != "function") {
        let message = format!("is {kind:?}, but only \"function\" is supported");
        return Err(Error::invalid(fields.name("type"), message));
    }
    let function: &RawValue = fields.require("function")?;
    let mut function = Fields::of_value(&fields.name("function"), function)?;
    let name: String = function.require("name")?;
    let path = function.name("name");
    function.finish()?;
    fields.finish()?;
    tools.iter().position(|tool| tool.name == name).ok_or_else(|| {
        let message = format!("is {name:?}, but none of the {} tools has this name", tools.len());
        Error::invalid(path, message)
    })
}

/// Takes `parallel_tool_calls`.
pub fn limit(fields: &mut Fields<'_>) -> Result<CallLimit, Error> {
    let parallel: Option<bool> = fields.take("parallel_tool_calls")?;
    Ok(if parallel == Some(false) { CallLimit::One } else { CallLimit::None })
}

#[cfg(test)]
mod tests;
