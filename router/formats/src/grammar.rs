//! Grammars of calls: what a model may write so that its format's reader finds calls of the declared tools.
//!
//! A grammar is a text in the Lark dialect of `llguidance`. A marker that is a token stands in it as `<[ID]>`, since
//! its text alone would be other tokens. Each format writes its own rules, beside its reader.

mod schema;
mod tagged;

use std::fmt::{Display, Write};

use serde_json::{Map, Value};
use tutti_constraints::MAX_GRAMMAR_BYTES;

pub(crate) use self::tagged::{Piece, TaggedValues};
use crate::{choice::Format, cursor::Vocabulary, output::CallLimit};

/// A tool in a grammar.
#[derive(Clone, Copy, Debug)]
pub struct ToolGrammar<'a> {
    name: &'a str,
    arguments: Arguments<'a>,
}

/// The arguments that a tool's calls may have.
#[derive(Clone, Copy, Debug)]
enum Arguments<'a> {
    None,
    Any,
    Schema(&'a Map<String, Value>),
}

impl<'a> ToolGrammar<'a> {
    /// A tool whose arguments follow a JSON schema.
    pub fn with_schema(name: &'a str, schema: &'a Map<String, Value>) -> Self {
        Self { name, arguments: Arguments::Schema(schema) }
    }

    /// A tool whose arguments are any JSON object.
    pub fn with_any_arguments(name: &'a str) -> Self {
        Self { name, arguments: Arguments::Any }
    }

    /// A tool without arguments.
    pub fn without_arguments(name: &'a str) -> Self {
        Self { name, arguments: Arguments::None }
    }
}

/// The outputs that a grammar allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Calls, at least one.
    Calls,
    /// Text, with calls anywhere in it.
    TextAndCalls,
}

/// The rules of the tools' calls are longer than a grammar may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("need a grammar of more than {MAX_GRAMMAR_BYTES} bytes, which is the limit")]
pub struct LongGrammar;

impl Format {
    /// The grammar of an output. `None` if calls in text cannot be told from text, because no token begins them.
    ///
    /// # Errors
    /// If the grammar is longer than one may be. The work is bounded: a parameter's rule repeats the definitions of its
    /// schema, so that a grammar may be many times as long as the schemas.
    pub fn grammar(
        self,
        tools: &[ToolGrammar<'_>],
        wanted: Wanted,
        limit: CallLimit,
        vocabulary: &Vocabulary,
    ) -> Result<Option<String>, LongGrammar> {
        let mut grammar = Grammar { tools, limit, vocabulary, rules: String::new(), has_text_value: false };
        let start = match (wanted, limit) {
            (Wanted::Calls, _) => "calls",
            (Wanted::TextAndCalls, _) if !self.begins_calls_by_tokens(vocabulary) => return Ok(None),
            (Wanted::TextAndCalls, CallLimit::None) => "FREE (calls FREE)*",
            (Wanted::TextAndCalls, CallLimit::One) => "FREE calls?",
        };
        grammar.rule("start", start);
        // Text without any token that is a marker.
        grammar.rule("FREE", r"/(.|\n)*/");
        self.write_grammar(&mut grammar);
        if grammar.is_long() { Err(LongGrammar) } else { Ok(Some(grammar.rules)) }
    }
}

/// A grammar as a format writes it. The format's rule is `calls`.
pub(crate) struct Grammar<'a> {
    tools: &'a [ToolGrammar<'a>],
    limit: CallLimit,
    vocabulary: &'a Vocabulary,
    rules: String,
    /// True if the rule of text between tags is written.
    has_text_value: bool,
}

impl<'a> Grammar<'a> {
    /// Adds a rule.
    pub fn rule(&mut self, name: impl Display, body: impl Display) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.rules, "{name}: {body}");
    }

    /// True if the grammar is longer than one may be, and need not be completed.
    fn is_long(&self) -> bool {
        self.rules.len() > MAX_GRAMMAR_BYTES
    }

    /// A text as a literal of Lark, whose escapes are those of JSON.
    pub fn text(&self, text: &str) -> String {
        Value::from(text).to_string()
    }

    /// A marker: its token, or its text if it is no token.
    pub fn marker(&self, text: &str) -> String {
        match self.vocabulary.id(text) {
            Some(id) => format!("<[{id}]>"),
            None => self.text(text),
        }
    }

    /// True if a marker is a token.
    pub fn is_token(&self, text: &str) -> bool {
        self.vocabulary.id(text).is_some()
    }

    /// Adds the rule `name`: one of the tools, as `body` writes it.
    pub fn any_tool(&mut self, name: &str, mut body: impl FnMut(&mut Self, Tool<'a>) -> String) {
        let tools = self.tools;
        let mut rules = Vec::with_capacity(tools.len());
        for (index, tool) in tools.iter().enumerate() {
            if self.is_long() {
                break;
            }
            let body = body(self, Tool { index, tool });
            let rule = format!("{name}{index}");
            self.rule(&rule, body);
            rules.push(rule);
        }
        self.rule(name, rules.join(" | "));
    }

    /// One of the rule, or several with a separator between them, as many as the request allows.
    pub fn repeated(&self, rule: &str, separator: &str) -> String {
        match self.limit {
            CallLimit::One => rule.to_owned(),
            CallLimit::None => format!("{rule} ({separator} {rule})*"),
        }
    }

    /// Adds the rule of a tool's arguments as JSON, and returns its name.
    pub fn arguments(&mut self, tool: Tool<'_>) -> String {
        let schema = match tool.tool.arguments {
            Arguments::None => return self.text("{}"),
            Arguments::Any => schema::any_object(),
            Arguments::Schema(schema) => schema::of_arguments(schema),
        };
        self.json(format!("args{}", tool.index), &schema)
    }

    /// Adds the rule of a JSON value, and returns its name.
    fn json(&mut self, name: String, schema: &Value) -> String {
        self.rule(&name, format!("%json {schema}"));
        name
    }
}

/// A tool while its rules are written.
#[derive(Clone, Copy)]
pub(crate) struct Tool<'a> {
    index: usize,
    tool: &'a ToolGrammar<'a>,
}

impl<'a> Tool<'a> {
    pub fn name(&self) -> &'a str {
        self.tool.name
    }
}
