//! Keywords of JSON Schema: those that hold schemas, and those that cannot be enforced.

use serde_json::Value;

use super::Path;
use crate::{error::ConstraintError, grammar::OPTIONS, text_bounds};

/// Keywords of any draft that cannot be enforced. The library refuses most of them, without their position, and ignores
/// those that the schema's own draft does not know.
const NOT_ENFORCED: [&str; 22] = [
    "$dynamicRef",
    "$recursiveRef",
    "contains",
    "contentSchema",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "disallow",
    "divisibleBy",
    "else",
    "extends",
    "if",
    "maxContains",
    "minContains",
    "not",
    "nullable",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
    OPTIONS,
];

/// Formats that are enforced.
const FORMATS: [&str; 10] =
    ["date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// The schemas inside a keyword's value.
pub(super) enum Children {
    /// None.
    None,
    /// The value is one.
    One,
    /// The value is a list of them.
    List,
    /// The value is one, or in older drafts a list.
    OneOrList,
    /// The value's members are some.
    Members,
}

impl Children {
    pub(super) fn of(keyword: &str) -> Self {
        match keyword {
            "properties" | "patternProperties" | "$defs" | "definitions" => Self::Members,
            "allOf" | "anyOf" | "oneOf" | "prefixItems" => Self::List,
            "items" => Self::OneOrList,
            "additionalProperties" | "additionalItems" => Self::One,
            _ => Self::None,
        }
    }
}

/// Refuses the keywords of a schema that cannot be enforced. Unknown keywords are annotations, as the standard has it.
pub(super) fn check(path: &Path<'_>, schema: &Value) -> Result<(), ConstraintError> {
    let members = match schema {
        Value::Object(members) => members,
        Value::Bool(_) => return Ok(()),
        _ => return Err(ConstraintError::at(path.to_string(), "is neither an object nor a boolean")),
    };
    for (keyword, value) in members {
        let path = path.member(keyword);
        match keyword.as_str() {
            // Without effect.
            "uniqueItems" | "nullable" if *value == false => {}
            keyword if NOT_ENFORCED.contains(&keyword) => {
                return Err(ConstraintError::at(path.to_string(), "cannot be enforced"));
            }
            "$ref" => check_reference(&path, value)?,
            // Formats of numbers, such as `int32`, are annotations.
            "format" if holds_strings(schema) => check_format(&path, value)?,
            "pattern" => {
                if let Some(pattern) = value.as_str() {
                    text_bounds::check_regex(&path.to_string(), pattern)?;
                }
            }
            "patternProperties" => {
                for (pattern, _) in value.as_object().into_iter().flatten() {
                    text_bounds::check_regex(&path.member(pattern).to_string(), pattern)?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// True if a schema's type does not exclude strings.
fn holds_strings(schema: &Value) -> bool {
    match schema.get("type") {
        Some(Value::String(kind)) => kind == "string",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
        _ => true,
    }
}

fn check_reference(path: &Path<'_>, value: &Value) -> Result<(), ConstraintError> {
    match value.as_str() {
        Some(reference) if reference == "#" || reference.starts_with("#/") => Ok(()),
        Some(_) => Err(ConstraintError::at(
            path.to_string(),
            "does not begin with `#/`, so it is not inside the schema",
        )),
        None => Err(ConstraintError::at(path.to_string(), "is no string")),
    }
}

fn check_format(path: &Path<'_>, value: &Value) -> Result<(), ConstraintError> {
    match value.as_str() {
        Some(format) if FORMATS.contains(&format) => Ok(()),
        Some(_) => {
            let known = FORMATS.join(", ");
            Err(ConstraintError::at(path.to_string(), format!("cannot be enforced; the formats are {known}")))
        }
        None => Err(ConstraintError::at(path.to_string(), "is no string")),
    }
}
