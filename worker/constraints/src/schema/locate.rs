//! The position of a schema that the library refuses. The library says what is wrong, but not where.

use serde_json::{Value, json};

use super::{Path, children};
use crate::{error::ConstraintError, limits::LOCATING_COMPILATIONS};

/// The position of the innermost schema that fails alone with the same error as the whole.
///
/// `compile` returns the error of a schema. Each schema inside is compiled with the definitions of the whole; the number of
/// compilations is bounded, and where it is used up, the position is the one that was found so far.
pub(crate) fn locate(
    root: &str,
    schema: &Value,
    error: ConstraintError,
    compile: &mut dyn FnMut(&Value) -> Option<ConstraintError>,
) -> ConstraintError {
    let root = Path::root(root);
    let definitions = ["$schema", "$defs", "definitions"].map(|name| (name, schema.get(name)));
    let mut left = LOCATING_COMPILATIONS;
    let mut fails = |child: &Value| {
        let mut alone = match child {
            Value::Bool(true) => return false,
            Value::Bool(false) => json!({"allOf": [false]}),
            child => child.clone(),
        };
        if left == 0 {
            return false;
        }
        left -= 1;
        if let Some(members) = alone.as_object_mut() {
            for (name, value) in definitions.iter().filter_map(|(name, value)| Some((*name, (*value)?))) {
                members.entry(name).or_insert_with(|| value.clone());
            }
        }
        compile(&alone).is_some_and(|found| found.message == error.message)
    };
    let path = innermost(&root, schema, &mut fails).unwrap_or_else(|| root.to_string());
    ConstraintError { path, message: error.message }
}

/// The position of the innermost failing schema inside one, or `None` if none inside fails.
fn innermost(path: &Path<'_>, schema: &Value, fails: &mut dyn FnMut(&Value) -> bool) -> Option<String> {
    // The error carries the position out of the loop over the children.
    let found = children(path, schema, &mut |path, child| match fails(child) {
        true => {
            Err(ConstraintError::at(innermost(path, child, fails).unwrap_or_else(|| path.to_string()), ""))
        }
        false => Ok(()),
    });
    found.err().map(|error| error.path)
}
