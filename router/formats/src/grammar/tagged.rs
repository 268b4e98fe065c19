//! Grammars of parameters between tags. Text goes on up to its closing tag, and other values are JSON.

use serde_json::{Map, Value};

use super::{Arguments, Grammar, Tool, schema};
use crate::tools::Types;

/// A part of the syntax around a value.
#[derive(Clone, Copy)]
pub(crate) enum Piece {
    /// A marker.
    Marker(&'static str),
    /// Text.
    Text(&'static str),
    /// A line break that a model may leave out.
    MaybeNewline,
}

/// How a family writes the parameters of a call.
pub(crate) struct TaggedValues {
    /// Before the name of a parameter.
    pub open: &'static [Piece],
    /// Between the name and a value that is text.
    pub before_text: &'static [Piece],
    /// Between the name and a value that is JSON.
    pub before_json: &'static [Piece],
    /// Line break of the format behind a value, and the closing tag.
    pub close: (&'static str, &'static str),
    /// Behind the closing tag.
    pub behind: &'static [Piece],
}

/// Names of parameters that are not declared.
const ANY_NAME: &str = "/[A-Za-z0-9_.-]{1,64}/";

impl<'a> Grammar<'a> {
    /// Parts in sequence.
    pub fn parts(&self, parts: &[Piece]) -> String {
        let written = parts.iter().map(|part| match part {
            Piece::Marker(text) => self.marker(text),
            Piece::Text(text) => self.text(text),
            Piece::MaybeNewline => r#"("\n")?"#.to_owned(),
        });
        written.collect::<Vec<_>>().join(" ")
    }

    /// The parameters of a call of a tool, in the order of its schema. Those that the schema does not require may be
    /// left out.
    pub fn parameters(&mut self, tool: Tool<'_>, tags: &TaggedValues) -> String {
        let schema = match named(tool.tool.arguments) {
            Arguments::None => return String::new(),
            Arguments::Any => {
                let text = self.text_value(tags);
                let (open, before) = (self.parts(tags.open), self.parts(tags.before_text));
                return format!("({open} {ANY_NAME} {before} {text})*");
            }
            Arguments::Schema(schema) => schema,
        };
        let mut parameters = Vec::new();
        for (position, (key, property)) in properties(schema).enumerate() {
            if self.is_long() {
                break;
            }
            let name = format!("value{}_{position}", tool.index);
            let (before, value) = self.value(name, property, schema, tags);
            let (open, key_text) = (self.parts(tags.open), self.text(key));
            let optional = if is_required(schema, key) { "" } else { "?" };
            parameters.push(format!("({open} {key_text} {} {value}){optional}", self.parts(before)));
        }
        parameters.join(" ")
    }

    /// The keyword arguments of a call of a tool, as JSON values with commas between them.
    pub fn keywords(&mut self, tool: Tool<'_>) -> String {
        let schema = match named(tool.tool.arguments) {
            Arguments::None => return String::new(),
            Arguments::Any => {
                let value = self.json(format!("value{}", tool.index), &schema::any_value());
                let one = format!(r#"{ANY_NAME} "=" {value}"#);
                return format!(r#"({one} (", " {one})*)?"#);
            }
            Arguments::Schema(schema) => schema,
        };
        // Two rules for each parameter and those behind it: with, and without, a comma before them.
        let count = properties(schema).count();
        let name = |comma: &str, position: usize| match position < count {
            true => format!("{comma}{}_{position}", tool.index),
            false => r#""""#.to_owned(),
        };
        for (position, (key, property)) in properties(schema).enumerate() {
            if self.is_long() {
                break;
            }
            let value =
                self.json(format!("value{}_{position}", tool.index), &schema::of_parameter(property, schema));
            let one = format!("{} {value} {}", self.text(&format!("{key}=")), name("more", position + 1));
            let (first, more) = match is_required(schema, key) {
                true => (one.clone(), format!(r#"", " {one}"#)),
                false => (
                    format!("{one} | {}", name("first", position + 1)),
                    format!(r#"", " {one} | {}"#, name("more", position + 1)),
                ),
            };
            self.rule(name("first", position), first);
            self.rule(name("more", position), more);
        }
        name("first", 0)
    }

    /// The value of a parameter with its closing tag, and what stands before it.
    fn value(
        &mut self,
        name: String,
        property: &Value,
        root: &Map<String, Value>,
        tags: &TaggedValues,
    ) -> (&'static [Piece], String) {
        let closed = |grammar: &Self, value: &str| {
            let (newline, close) = tags.close;
            let newline = if newline.is_empty() { String::new() } else { grammar.text(newline) };
            format!("{value} {newline} {} {}", grammar.marker(close), grammar.parts(tags.behind))
        };
        let texts = property.get("enum").and_then(Value::as_array).filter(|values| !values.is_empty());
        if let Some(texts) = texts
            && let Some(texts) = texts.iter().map(Value::as_str).collect::<Option<Vec<_>>>()
        {
            let texts: Vec<_> = texts.into_iter().map(|text| self.text(text)).collect();
            return (tags.before_text, closed(self, &format!("({})", texts.join(" | "))));
        }
        if let Some(text) = property.get("const").and_then(Value::as_str) {
            return (tags.before_text, closed(self, &self.text(text)));
        }
        if Types::of_schema(property, root).allow_text() {
            return (tags.before_text, self.text_value(tags));
        }
        let json = self.json(name, &schema::of_parameter(property, root));
        (tags.before_json, closed(self, &json))
    }

    /// Any text up to the closing tag, and the tag. A tag that is no token ends the text where it stands first.
    fn text_value(&mut self, tags: &TaggedValues) -> String {
        let (newline, close) = tags.close;
        let behind = self.parts(tags.behind);
        if self.is_token(close) {
            return format!("FREE {} {behind}", self.marker(close));
        }
        const RULE: &str = "text_value";
        if !std::mem::replace(&mut self.has_text_value, true) {
            let close = self.text(&format!("{newline}{close}"));
            self.rule(format!("{RULE}[lazy]"), format!(r"/(.|\n)*/ {close}"));
        }
        format!("{RULE} {behind}")
    }
}

/// The arguments as far as parameters can be named. A schema that declares none, and is not closed, leaves them free:
/// it says by a reference or by other keywords what they are, or does not say it.
fn named(arguments: Arguments<'_>) -> Arguments<'_> {
    match arguments {
        Arguments::Schema(schema)
            if !schema.contains_key("properties")
                && schema.get("additionalProperties") != Some(&Value::Bool(false)) =>
        {
            Arguments::Any
        }
        other => other,
    }
}

/// True if a schema requires a parameter.
fn is_required(schema: &Map<String, Value>, key: &str) -> bool {
    let required = schema.get("required").and_then(Value::as_array);
    required.is_some_and(|required| required.iter().any(|name| name == key))
}

/// The parameters that a schema declares.
fn properties(schema: &Map<String, Value>) -> impl Iterator<Item = (&String, &Value)> {
    schema.get("properties").and_then(Value::as_object).into_iter().flatten()
}
