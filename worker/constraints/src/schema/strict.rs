//! The rules of OpenAI's strict mode: every object is closed, and all its members are required, so that a model neither
//! invents nor forgets one.

use serde_json::Value;

use super::Path;
use crate::error::ConstraintError;

/// Checks the outermost schema: an object, and no union.
pub(super) fn check_root(path: &Path<'_>, schema: &Value) -> Result<(), ConstraintError> {
    if schema.get("anyOf").is_some() {
        return Err(ConstraintError::at(
            path.member("anyOf").to_string(),
            "is not allowed here in strict mode",
        ));
    }
    match schema.get("type") {
        Some(kind) if kind == "object" => Ok(()),
        _ => Err(ConstraintError::at(path.member("type").to_string(), "must be \"object\" in strict mode")),
    }
}

/// Checks one schema, without those inside it.
pub(super) fn check(path: &Path<'_>, schema: &Value) -> Result<(), ConstraintError> {
    if !is_object(schema) {
        return Ok(());
    }
    match schema.get("additionalProperties") {
        Some(Value::Bool(false)) => {}
        _ => {
            let path = path.member("additionalProperties").to_string();
            return Err(ConstraintError::at(path, "must be false in strict mode"));
        }
    }
    let required: Vec<&str> = schema
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let members = schema.get("properties").and_then(Value::as_object);
    for (name, _) in members.into_iter().flatten() {
        if !required.contains(&name.as_str()) {
            let properties = path.member("properties");
            return Err(ConstraintError::at(
                properties.member(name).to_string(),
                "must be required in strict mode",
            ));
        }
    }
    match required.iter().position(|name| members.is_none_or(|members| !members.contains_key(*name))) {
        Some(n) => {
            let path = path.member("required");
            Err(ConstraintError::at(path.element(n).to_string(), "is not in `properties`"))
        }
        None => Ok(()),
    }
}

/// True if a schema describes objects.
fn is_object(schema: &Value) -> bool {
    let is_typed = match schema.get("type") {
        Some(Value::String(kind)) => kind == "object",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "object"),
        _ => false,
    };
    is_typed || schema.get("properties").is_some()
}
