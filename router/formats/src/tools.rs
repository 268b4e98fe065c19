//! The tools of a request, as far as a parser needs them: the types of their parameters.
//!
//! Families that write parameters as bare text leave it to the schema whether `12` is a number or a text.

mod types;

use std::{collections::HashMap, sync::Arc};

use serde_json::{Map, Value};

pub(crate) use self::types::Types;

/// The declared tools: the JSON Schema of the parameters by the tool's name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tools {
    schemas: HashMap<String, Arc<Map<String, Value>>>,
}

/// Tools with their names and schemas. A tool without parameters may have any schema. The caller refuses two tools of
/// one name; the last one counts.
impl FromIterator<(String, Arc<Map<String, Value>>)> for Tools {
    fn from_iter<T: IntoIterator<Item = (String, Arc<Map<String, Value>>)>>(tools: T) -> Self {
        Self { schemas: tools.into_iter().collect() }
    }
}

impl Tools {
    /// True if a tool has this name.
    pub fn declares(&self, name: &str) -> bool {
        self.schemas.contains_key(name)
    }

    /// The schema of a parameter.
    fn parameter(&self, tool: &str, key: &str) -> Option<&Value> {
        self.schemas.get(tool)?.get("properties")?.get(key)
    }

    /// True if the tool declares the parameter.
    pub(crate) fn has_parameter(&self, tool: &str, key: &str) -> bool {
        self.parameter(tool, key).is_some()
    }

    /// The types that a parameter may have. What is not declared is text.
    pub(crate) fn types(&self, tool: &str, key: &str) -> Types {
        match (self.parameter(tool, key), self.schemas.get(tool)) {
            (Some(schema), Some(root)) => Types::of_schema(schema, root),
            _ => Types::TEXT,
        }
    }
}

#[cfg(test)]
mod tests;
