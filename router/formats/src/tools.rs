//! The tools of a request, as far as a parser needs them: the types of their parameters.
//!
//! Families that write parameters as bare text leave it to the schema whether `12` is a number or a text.

mod types;

use std::collections::HashMap;

use serde_json::Value;

pub(crate) use self::types::Types;

/// The declared tools: the JSON Schema of the parameters by the tool's name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tools {
    schemas: HashMap<String, Value>,
}

/// Two tools have this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("two tools are named {0:?}; names of tools must differ")]
pub struct DuplicateTool(pub String);

impl Tools {
    /// The tools with these names and schemas. A tool without parameters may have any schema.
    pub fn new(tools: impl IntoIterator<Item = (String, Value)>) -> Result<Self, DuplicateTool> {
        let mut schemas = HashMap::new();
        for (name, schema) in tools {
            if schemas.contains_key(&name) {
                return Err(DuplicateTool(name));
            }
            schemas.insert(name, schema);
        }
        Ok(Self { schemas })
    }

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
