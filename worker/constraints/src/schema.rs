//! Checks of JSON schemas that the library does not make, or that it makes without the position.

mod bounds;
mod keywords;
pub(crate) mod locate;
mod path;
mod strict;

use serde_json::Value;

use crate::{constraint::Strictness, error::ConstraintError};

pub(crate) use self::path::Path;

/// Checks a schema before it is compiled: its size, the keywords that cannot be enforced, and the rules of strict mode.
pub fn check(root: &str, schema: &Value, strictness: Strictness) -> Result<(), ConstraintError> {
    bounds::check(root, schema)?;
    let root = Path::root(root);
    let mut count = bounds::Count::default();
    visit(&root, schema, &mut |path, schema| {
        count.add(path, schema)?;
        keywords::check(path, schema)
    })?;
    match strictness {
        Strictness::Lenient => Ok(()),
        Strictness::Strict => {
            strict::check_root(&root, schema)?;
            visit(&root, schema, &mut strict::check)
        }
    }
}

/// Calls a function with each schema of a schema, parents first. The depth is bounded by [`bounds::check`].
fn visit(
    path: &Path<'_>,
    schema: &Value,
    each: &mut dyn FnMut(&Path<'_>, &Value) -> Result<(), ConstraintError>,
) -> Result<(), ConstraintError> {
    each(path, schema)?;
    children(path, schema, &mut |path, child| visit(path, child, each))
}

/// Calls a function with the schemas directly inside a schema.
fn children(
    path: &Path<'_>,
    schema: &Value,
    each: &mut dyn FnMut(&Path<'_>, &Value) -> Result<(), ConstraintError>,
) -> Result<(), ConstraintError> {
    for (keyword, value) in schema.as_object().into_iter().flatten() {
        let path = path.member(keyword);
        match (keywords::Children::of(keyword), value) {
            (keywords::Children::Members, Value::Object(members)) => {
                for (name, child) in members {
                    each(&path.member(name), child)?;
                }
            }
            (keywords::Children::List | keywords::Children::OneOrList, Value::Array(list)) => {
                for (n, child) in list.iter().enumerate() {
                    each(&path.element(n), child)?;
                }
            }
            (keywords::Children::One | keywords::Children::OneOrList, child) => each(&path, child)?,
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
