//! Converts constraints to grammars of `llguidance`.

mod lark;
mod structural_tags;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Map, Value, json};

use crate::{
    constraint::{Constraint, Kind, Thinking, Whitespace},
    error::ConstraintError,
};

/// The option of the library in a schema. Schemas of clients must not have it.
pub(crate) const OPTIONS: &str = "x-guidance";

/// Name of the answer's grammar.
const ANSWER: &str = "answer";

/// White space of [`Whitespace::Bounded`].
const BOUNDED_WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,8}";

/// The grammar of a whole output: the thinking block, then the answer.
pub(crate) fn of(
    constraint: &Constraint,
    special: &[(String, u32)],
) -> Result<TopLevelGrammar, ConstraintError> {
    let mut grammars = answer(constraint, special)?;
    // Token ids and not texts: a text in quotes would be the bytes of the marker, which its token does not match.
    let block = match constraint.thinking {
        Thinking::Closed => None,
        Thinking::Open { end } => Some(format!(r"/(.|\n)*/ <[{end}]> /\n{{0,2}}/")),
        Thinking::Optional { begin, end } => Some(format!(r"(<[{begin}]> /(.|\n)*/ <[{end}]> /\n{{0,2}}/)?")),
    };
    if let Some(block) = block {
        let whole = named("output", GrammarWithLexer::from_lark(format!("start: {block} @{ANSWER}\n")));
        grammars.insert(0, whole);
    }
    Ok(TopLevelGrammar { grammars, max_tokens: None })
}

/// The grammars of an answer, the outermost first.
fn answer(
    constraint: &Constraint,
    special: &[(String, u32)],
) -> Result<Vec<GrammarWithLexer>, ConstraintError> {
    let whitespace = constraint.whitespace;
    let grammar = match &constraint.kind {
        Kind::JsonObject => of_schema(&json!({"type": "object"}), whitespace),
        Kind::JsonSchema { schema, .. } => of_schema(schema, whitespace),
        Kind::Regex(pattern) => GrammarWithLexer::from_regex(pattern),
        Kind::Choice(choices) => GrammarWithLexer::from_regex(&lark::any_of(choices)),
        Kind::Lark(grammar) => GrammarWithLexer::from_lark(grammar.clone()),
        Kind::StructuralTags { tags, triggers } => {
            let text = structural_tags::to_lark(tags, triggers, special)?;
            let contents = tags.iter().enumerate();
            let contents = contents
                .map(|(n, tag)| named(&structural_tags::content(n), of_schema(&tag.schema, whitespace)));
            let whole = named(ANSWER, GrammarWithLexer::from_lark(text));
            return Ok(std::iter::once(whole).chain(contents).collect());
        }
    };
    Ok(vec![named(ANSWER, grammar)])
}

fn named(name: &str, grammar: GrammarWithLexer) -> GrammarWithLexer {
    GrammarWithLexer { name: Some(name.to_owned()), ..grammar }
}

/// A schema in which white space is bounded, as [`Whitespace::Bounded`] has it, for grammars with schemas inside.
pub fn with_bounded_whitespace(mut schema: Map<String, Value>) -> Value {
    schema.insert(OPTIONS.to_owned(), json!({ "whitespace_pattern": BOUNDED_WHITESPACE }));
    Value::Object(schema)
}

fn of_schema(schema: &Value, whitespace: Whitespace) -> GrammarWithLexer {
    let mut members = match schema {
        Value::Object(members) => members.clone(),
        Value::Bool(true) => Map::new(),
        // The library refuses all that is no schema, with its reason.
        other => return GrammarWithLexer::from_json_schema(other.clone()),
    };
    let options = match whitespace {
        Whitespace::Compact => json!({"whitespace_flexible": false}),
        Whitespace::Bounded => return GrammarWithLexer::from_json_schema(with_bounded_whitespace(members)),
        Whitespace::Any => json!({}),
    };
    members.insert(OPTIONS.to_owned(), options);
    GrammarWithLexer::from_json_schema(Value::Object(members))
}
