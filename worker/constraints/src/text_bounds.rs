//! Bounds of regular expressions, grammars, choices and structural tags, which hold before anything is parsed. The
//! library's parsers recurse and allocate.

use std::panic::AssertUnwindSafe;

use llguidance::{derivre::RegexBuilder, panic_utils};
use serde_json::Value;

use crate::{
    constraint::StructuralTag,
    error::ConstraintError,
    limits::{MAX_BRACKETS, MAX_BYTES, MAX_REGEX_BYTES, MAX_RULES, MAX_TAGS, MAX_VALUE_BYTES, MAX_VALUES},
};

/// Checks a regular expression: its size, its brackets, and that the library reads it.
pub(crate) fn check_regex(path: &str, pattern: &str) -> Result<(), ConstraintError> {
    at_most(path, "bytes", pattern.len(), MAX_REGEX_BYTES)?;
    if pattern.is_empty() {
        return Err(ConstraintError::at(path, "is empty"));
    }
    check_brackets(path, pattern)?;
    let read =
        panic_utils::catch_unwind(AssertUnwindSafe(|| RegexBuilder::new().mk_regex_for_serach(pattern)));
    read.map(|_| ()).map_err(|error| {
        let error = error.to_string();
        // The last line of the parser's error says what is wrong; those before it draw the position.
        let reason =
            error.lines().rev().find_map(|line| line.trim().strip_prefix("error: ")).unwrap_or(&error);
        ConstraintError::of_library(path, format!("is no regular expression: {reason}"))
    })
}

/// Checks a regular expression that a whole text follows. Anchors around it are allowed and mean nothing.
pub(crate) fn check_whole_regex(path: &str, pattern: &str) -> Result<(), ConstraintError> {
    match pattern.trim_matches(['^', '$']) {
        "" => Err(ConstraintError::at(path, "is empty")),
        _ => check_regex(path, pattern),
    }
}

/// Checks a list of choices.
pub(crate) fn check_choices(path: &str, choices: &[String]) -> Result<(), ConstraintError> {
    if choices.is_empty() {
        return Err(ConstraintError::at(path, "is empty"));
    }
    at_most(path, "choices", choices.len(), MAX_VALUES)?;
    at_most(path, "bytes", choices.iter().map(String::len).sum(), MAX_VALUE_BYTES)?;
    match choices.iter().position(String::is_empty) {
        Some(n) => Err(ConstraintError::at(format!("{path}[{n}]"), "is empty")),
        None => Ok(()),
    }
}

/// Checks a grammar in Lark.
pub(crate) fn check_lark(path: &str, grammar: &str) -> Result<(), ConstraintError> {
    at_most(path, "bytes", grammar.len(), MAX_BYTES)?;
    if grammar.trim().is_empty() {
        return Err(ConstraintError::at(path, "is empty"));
    }
    check_brackets(path, grammar)?;
    if ends_with_the_request(grammar) {
        // Which tokens end a request is not the grammar's to say.
        return Err(ConstraintError::at(
            path,
            "has a rule with an empty `stop` or `suffix`, which is not supported",
        ));
    }
    // Each rule, terminal and alternative has one of these; texts may have more of them.
    at_most(path, "rules and alternatives", without_json(grammar).matches([':', '|']).count(), MAX_RULES)
}

/// A grammar without the JSON behind each `%json`, which adds no rules of the grammar. JSON that does not parse stays,
/// and the library refuses it.
fn without_json(grammar: &str) -> String {
    const JSON: &str = "%json";
    let mut rest = grammar;
    let mut bare = String::with_capacity(grammar.len());
    while let Some(at) = rest.find(JSON) {
        let (before, json) = rest.split_at(at + JSON.len());
        bare.push_str(before);
        // An object alone: a text in quotes could hide alternatives behind a literal that ends with `%json`.
        let is_object = json.trim_start().starts_with('{');
        let mut values = serde_json::Deserializer::from_str(json).into_iter::<Value>();
        let is_json = is_object && matches!(values.next(), Some(Ok(_)));
        rest = if is_json { &json[values.byte_offset()..] } else { json };
    }
    bare + rest
}

/// True if a rule's text ends with an end token, which the library writes as an empty `stop`.
fn ends_with_the_request(grammar: &str) -> bool {
    ["stop", "suffix"].iter().flat_map(|attribute| grammar.split(attribute).skip(1)).any(|rest| {
        let value = rest.trim_start().strip_prefix('=').map(str::trim_start);
        value.is_some_and(|value| value.starts_with("\"\""))
    })
}

/// Checks structural tags, apart from their schemas.
pub(crate) fn check_tags(
    path: &str,
    tags: &[StructuralTag],
    triggers: &[String],
) -> Result<(), ConstraintError> {
    if tags.is_empty() {
        return Err(ConstraintError::at(format!("{path}.structures"), "is empty"));
    }
    at_most(&format!("{path}.structures"), "tags", tags.len(), MAX_TAGS)?;
    at_most(&format!("{path}.triggers"), "triggers", triggers.len(), MAX_TAGS)?;
    let texts = tags.iter().flat_map(|tag| [&tag.begin, &tag.end]).chain(triggers);
    at_most(path, "bytes", texts.map(String::len).sum(), MAX_BYTES)?;
    if let Some(t) = triggers.iter().position(String::is_empty) {
        return Err(ConstraintError::at(format!("{path}.triggers[{t}]"), "is empty"));
    }
    let begins = |tag: &StructuralTag, trigger: &String| tag.begin.starts_with(trigger.as_str());
    if let Some(n) = tags.iter().position(|tag| !triggers.iter().any(|trigger| begins(tag, trigger))) {
        return Err(ConstraintError::at(format!("{path}.structures[{n}].begin"), "begins with no trigger"));
    }
    match triggers.iter().position(|trigger| !tags.iter().any(|tag| begins(tag, trigger))) {
        Some(t) => Err(ConstraintError::at(format!("{path}.triggers[{t}]"), "begins no structure")),
        None => Ok(()),
    }
}

/// Refuses a number over its limit.
pub(crate) fn at_most(path: &str, unit: &str, number: usize, limit: usize) -> Result<(), ConstraintError> {
    match number <= limit {
        true => Ok(()),
        false => Err(ConstraintError::at(path, format!("has {number} {unit}; the limit is {limit}"))),
    }
}

/// Refuses deeply nested brackets. Brackets in texts count too, which only a grammar with dozens of them notices.
fn check_brackets(path: &str, text: &str) -> Result<(), ConstraintError> {
    let (mut depth, mut deepest) = (0_usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    match deepest <= MAX_BRACKETS {
        true => Ok(()),
        false => Err(ConstraintError::at(
            path,
            format!("nests brackets {deepest} deep; the limit is {MAX_BRACKETS}"),
        )),
    }
}

#[cfg(test)]
mod tests;
