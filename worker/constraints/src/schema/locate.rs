//! The position of a schema that the library refuses. The library says what is wrong, but not where.

use serde_json::{Value, json};

use super::{Path, children};
use crate::{error::ConstraintError, limits::LOCATING_COMPILATIONS};

/// An error at the position of the innermost schema that fails alone for the reason of the whole. The library writes
/// the reason of a schema inside behind that of the schema around it.
///
/// `compile` returns the error of a schema. Each schema inside is compiled with the definitions of the whole; the
/// number of compilations is bounded, and where it is used up, the position is the one that was found so far.
pub(crate) fn locate(
    root: &str,
    schema: &Value,
    error: ConstraintError,
    compile: &mut dyn FnMut(&Value) -> Option<ConstraintError>,
) -> ConstraintError {
    let root = Path::root(root);
    let definitions = ["$schema", "$defs", "definitions"].map(|name| (name, schema.get(name)));
    let mut left = LOCATING_COMPILATIONS;
    let mut error_of = |child: &Value| {
        let mut alone = match child {
            Value::Bool(true) => return None,
            Value::Bool(false) => json!({"allOf": [false]}),
            child => child.clone(),
        };
        if left == 0 {
            return None;
        }
        left -= 1;
        if let Some(members) = alone.as_object_mut() {
            for (name, value) in definitions.iter().filter_map(|(name, value)| Some((*name, (*value)?))) {
                members.entry(name).or_insert_with(|| value.clone());
            }
        }
        compile(&alone)
    };
    let found = innermost(&root, schema, &error.message, &mut error_of);
    found.unwrap_or_else(|| ConstraintError::at(root.to_string(), error.message))
}

/// The error of the innermost schema that fails for a reason inside one, or `None` if none inside does.
fn innermost(
    path: &Path<'_>,
    schema: &Value,
    reason: &str,
    error_of: &mut dyn FnMut(&Value) -> Option<ConstraintError>,
) -> Option<ConstraintError> {
    // The error carries what was found out of the loop over the children.
    let found = children(path, schema, &mut |path, child| match error_of(child) {
        Some(error) if ends_with(reason, &error.message) => {
            let inside = innermost(path, child, &error.message, error_of);
            Err(inside.unwrap_or_else(|| ConstraintError::at(path.to_string(), error.message)))
        }
        _ => Ok(()),
    });
    found.err()
}

/// True if a reason is the end of another. The first letter of each is in lower case.
fn ends_with(whole: &str, reason: &str) -> bool {
    let at = whole.len().checked_sub(reason.len()).and_then(|at| whole.get(at..));
    at.is_some_and(|end| end.eq_ignore_ascii_case(reason))
}
