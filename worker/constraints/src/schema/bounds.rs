//! Bounds of a schema's size. Its compiler recurses and allocates.

use serde_json::Value;

use super::Path;
use crate::{
    error::ConstraintError,
    limits::{MAX_BYTES, MAX_DEPTH, MAX_SCHEMAS, MAX_VALUE_BYTES, MAX_VALUES},
    text_bounds::at_most,
};

/// Checks the size and the depth of a schema as JSON.
pub(super) fn check(root: &str, schema: &Value) -> Result<(), ConstraintError> {
    at_most(root, "bytes", schema.to_string().len(), MAX_BYTES)?;
    match depth(schema) {
        depth if depth > 3 * MAX_DEPTH => Err(too_deep(root, depth)),
        _ => schema_depth(&Path::root(root), schema, 1),
    }
}

/// Nesting of a value, without recursion.
fn depth(value: &Value) -> usize {
    let mut deepest = 0;
    let mut pending = vec![(value, 1)];
    while let Some((value, depth)) = pending.pop() {
        deepest = deepest.max(depth);
        match value {
            Value::Array(list) => pending.extend(list.iter().map(|value| (value, depth + 1))),
            Value::Object(members) => pending.extend(members.values().map(|value| (value, depth + 1))),
            _ => {}
        }
    }
    deepest
}

/// Checks the nesting of schemas. It recurses, so [`depth`] comes first.
fn schema_depth(path: &Path<'_>, schema: &Value, depth: usize) -> Result<(), ConstraintError> {
    if depth > MAX_DEPTH {
        return Err(too_deep(&path.to_string(), depth));
    }
    super::children(path, schema, &mut |path, child| schema_depth(path, child, depth + 1))
}

fn too_deep(path: &str, depth: usize) -> ConstraintError {
    ConstraintError::at(path, format!("is nested {depth} deep; the limit is {MAX_DEPTH}"))
}

/// Counts what a schema holds.
#[derive(Default)]
pub(super) struct Count {
    schemas: usize,
    values: usize,
    value_bytes: usize,
}

impl Count {
    /// Adds a schema, without the schemas inside it.
    pub(super) fn add(&mut self, path: &Path<'_>, schema: &Value) -> Result<(), ConstraintError> {
        self.schemas += 1;
        if self.schemas > MAX_SCHEMAS {
            let message = format!("is schema number {}; the limit is {MAX_SCHEMAS}", self.schemas);
            return Err(ConstraintError::at(path.to_string(), message));
        }
        let Some(values) = schema.get("enum").and_then(Value::as_array) else { return Ok(()) };
        self.values += values.len();
        self.value_bytes += values.iter().map(|value| value.to_string().len()).sum::<usize>();
        let path = path.member("enum").to_string();
        at_most(&path, "values with all before it", self.values, MAX_VALUES)?;
        at_most(&path, "bytes of values with all before it", self.value_bytes, MAX_VALUE_BYTES)
    }
}
