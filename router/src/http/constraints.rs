//! The constraint of an answer, under the names of OpenAI's and of vLLM's API. For clients,
//! `docs/structured-output.md` describes it.

mod structural_tag;
mod whitespace;

use serde_json::value::RawValue;
use tutti_proto::{
    parameters::Scope,
    v1::{self as pb, Constraint, constraint::Kind},
};
use tutti_runtime::Error;

use self::whitespace::WhitespaceOptions;
use super::fields::{self, Fields};
use crate::constraints;

/// Maximum number of choices that are parsed, which bounds their memory. It is above the limit of constraints, so that
/// its error can name the number.
const MAX_LISTED: usize = 16_384;

/// Name of OpenAI's parameter.
const RESPONSE_FORMAT: &str = "response_format";
/// Name of vLLM's parameter.
const STRUCTURED_OUTPUTS: &str = "structured_outputs";

/// The constraint that a request asks for.
#[derive(Debug, Default, PartialEq)]
pub struct Asked {
    /// The constraint; `None` for any text.
    pub constraint: Option<Constraint>,
    /// The client's name for it.
    pub name: ConstraintName,
}

/// A client's name for its constraint, such as `response_format.json_schema.schema`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConstraintName(&'static str);

impl ConstraintName {
    /// The name of the constraint that required, named and strict tools are.
    pub const TOOLS: Self = Self("tools");

    /// Renames the field of an error from the core's name to the client's.
    pub fn respell(self, error: Error) -> Error {
        match self.0 {
            "" => error,
            name => constraints::respell(error, name),
        }
    }
}

/// A constraint with its name.
type Named = (Kind, &'static str);

/// Takes the constraint of a request. A request has at most one.
pub fn take(fields: &mut Fields<'_>) -> Result<Asked, Error> {
    let mut found: Vec<Named> = response_format(fields)?.into_iter().collect();
    let mut whitespace = WhitespaceOptions::default();
    if let Some(value) = fields.take_raw(STRUCTURED_OUTPUTS) {
        let mut outputs = Fields::of_object(STRUCTURED_OUTPUTS, value, Scope::StructuredOutputs)?;
        found.extend(structured_outputs(&mut outputs)?);
        whitespace = WhitespaceOptions::take(&mut outputs)?;
        outputs.finish()?;
    }
    for (name, read) in OLDER {
        if let Some(value) = fields.take_raw(name).filter(|value| !is_empty(value)) {
            found.push((read(name, value)?, name));
        }
    }
    whitespace.take_guided(fields)?;
    let mut found = found.into_iter();
    let Some((kind, name)) = found.next() else { return Ok(Asked::default()) };
    if let Some((_, other)) = found.next() {
        let message = format!("cannot be given together with {name}: an answer follows one constraint");
        return Err(Error::invalid(other, message));
    }
    let constraint = Constraint { kind: Some(kind), whitespace: whitespace.resolve()?.into() };
    Ok(Asked { constraint: Some(constraint), name: ConstraintName(name) })
}

/// Takes `response_format`.
fn response_format(fields: &mut Fields<'_>) -> Result<Option<Named>, Error> {
    let Some(value) = fields.take_raw(RESPONSE_FORMAT) else { return Ok(None) };
    let mut format = Fields::of_value(RESPONSE_FORMAT, value)?;
    let Some(kind) = format.take::<String>("type")? else {
        let required = |_| Error::invalid("response_format.type", "is required");
        return format.finish().map(|()| None).map_err(required);
    };
    let found = match kind.as_str() {
        "text" => None,
        "json_object" => Some((Kind::JsonObject(pb::JsonObject {}), RESPONSE_FORMAT)),
        "json_schema" => {
            let schema = json_schema(format.require("json_schema")?)?;
            Some((Kind::JsonSchema(schema), "response_format.json_schema.schema"))
        }
        "structural_tag" => Some((Kind::StructuralTags(structural_tag::take(&mut format)?), RESPONSE_FORMAT)),
        _ => {
            let message =
                format!("is {kind:?}, but must be one of text, json_object, json_schema, structural_tag");
            return Err(Error::invalid("response_format.type", message));
        }
    };
    if format.take_raw("json_schema").is_some() {
        let message = format!("may only be given with the type json_schema, but the type is {kind:?}");
        return Err(Error::invalid("response_format.json_schema", message));
    }
    format.finish()?;
    Ok(found)
}

/// Reads OpenAI's `json_schema`. Its name and its description are for readers.
fn json_schema(value: &RawValue) -> Result<pb::JsonSchema, Error> {
    let mut fields = Fields::of_value("response_format.json_schema", value)?;
    let name: String = fields.require("name")?;
    if name.is_empty() {
        return Err(Error::invalid(fields.name("name"), "is empty"));
    }
    let _: Option<String> = fields.take("description")?;
    let schema: &RawValue = fields.require("schema")?;
    let strict = fields.take_or_default("strict")?;
    fields.finish()?;
    Ok(pb::JsonSchema { schema: schema.get().to_owned(), strict })
}

/// Takes the kinds of `structured_outputs`.
fn structured_outputs(fields: &mut Fields<'_>) -> Result<Vec<Named>, Error> {
    let mut found = Vec::new();
    for (member, name, read) in OUTPUTS {
        if let Some(value) = fields.take_raw(member) {
            found.push((read(name, value)?, name));
        }
    }
    if fields.take_or_default("json_object")? {
        found.push((Kind::JsonObject(pb::JsonObject {}), "structured_outputs.json_object"));
    }
    Ok(found)
}

/// Reads a constraint from the value of the parameter of this name.
type Reader = fn(&str, &RawValue) -> Result<Kind, Error>;

/// The members of `structured_outputs` that are constraints, with their names in errors.
const OUTPUTS: [(&str, &str, Reader); 5] = [
    ("json", "structured_outputs.json", schema),
    ("regex", "structured_outputs.regex", regex),
    ("choice", "structured_outputs.choice", choice),
    ("grammar", "structured_outputs.grammar", grammar),
    ("structural_tag", "structured_outputs.structural_tag", structural_tag),
];

/// vLLM's older names. Clients send them with empty values to ask for nothing.
const OLDER: [(&str, Reader); 5] = [
    ("guided_json", schema),
    ("guided_regex", regex),
    ("guided_choice", choice),
    ("guided_grammar", grammar),
    ("structural_tag", structural_tag),
];

/// True for an empty object, list or text.
fn is_empty(value: &RawValue) -> bool {
    let json = value.get();
    let inside = |open, close| json.strip_prefix(open).and_then(|json| json.strip_suffix(close));
    let inside = inside("{", "}").or_else(|| inside("[", "]"));
    json == "\"\"" || inside.is_some_and(|inside: &str| inside.trim_ascii().is_empty())
}

/// Reads a schema: an object, or its JSON as a text.
fn schema(name: &str, value: &RawValue) -> Result<Kind, Error> {
    Ok(Kind::JsonSchema(pb::JsonSchema { schema: object_text(name, value)?, strict: false }))
}

/// The JSON of an object that is given as one, or as a text.
fn object_text(name: &str, value: &RawValue) -> Result<String, Error> {
    match value.get().as_bytes().first() {
        Some(b'{') => Ok(value.get().to_owned()),
        Some(b'"') => fields::parse(name, value),
        _ => Err(Error::invalid(name, "must be an object, or the JSON of one as a text")),
    }
}

fn regex(name: &str, value: &RawValue) -> Result<Kind, Error> {
    fields::parse(name, value).map(Kind::Regex)
}

fn choice(name: &str, value: &RawValue) -> Result<Kind, Error> {
    let texts = fields::list(name, value, MAX_LISTED)?;
    Ok(Kind::Choice(pb::Choices { texts }))
}

fn grammar(name: &str, value: &RawValue) -> Result<Kind, Error> {
    fields::parse(name, value).map(Kind::Lark)
}

fn structural_tag(name: &str, value: &RawValue) -> Result<Kind, Error> {
    structural_tag::read(name, value).map(Kind::StructuralTags)
}

#[cfg(test)]
mod tests;
