//! Structural tags as a Lark grammar: free text, and behind each trigger one of the tags that begin with it.

use std::fmt::Write;

use super::lark::literal;
use crate::{constraint::StructuralTag, error::ConstraintError};

/// Name of the grammar of a tag's content.
pub(super) fn content(n: usize) -> String {
    format!("content{n}")
}

/// A piece of a tag's text.
#[derive(Debug, PartialEq)]
enum Piece<'a> {
    Text(&'a str),
    /// A special token whose text the tag has. The text alone would be bytes, which the token does not match.
    Special(u32),
}

/// The grammar. `special` has the special tokens' texts, the longest first.
pub(super) fn to_lark(
    tags: &[StructuralTag],
    triggers: &[String],
    special: &[(String, u32)],
) -> Result<String, ConstraintError> {
    // Free text goes on until a trigger is complete: its lead takes the shortest text, and lexers prefer that to the
    // longest.
    let mut grammar = String::from("start: call* tail\ntail: FREE\nFREE: /(.|\\n)*/\n");
    let mut calls = Vec::new();
    for (t, trigger) in triggers.iter().enumerate() {
        let lead = match &pieces(trigger, special)[..] {
            // The shortest text that ends with the trigger: the text up to its first occurrence.
            [Piece::Text(text)] => format!("lead{t}[lazy]: /(.|\\n)*/ {}\n", literal(text)),
            [Piece::Special(id)] => format!("lead{t}: FREE <[{id}]>\n"),
            _ => {
                let path = format!("structural_tag.triggers[{t}]");
                return Err(ConstraintError::at(path, "is neither text nor one special token"));
            }
        };
        grammar.push_str(&lead);
        let mut rests = Vec::new();
        for (n, tag) in tags.iter().enumerate().filter(|(_, tag)| trigger_of(tag, triggers) == Some(t)) {
            let begin = sequence(&pieces(&tag.begin[trigger.len()..], special));
            let end = sequence(&pieces(&tag.end, special));
            rests.push(format!("{begin} @{} {end}", content(n)));
        }
        if !rests.is_empty() {
            let _ = writeln!(grammar, "call{t}: lead{t} ({})", rests.join(" | "));
            calls.push(format!("call{t}"));
        }
    }
    let _ = writeln!(grammar, "call: {}", calls.join(" | "));
    Ok(grammar)
}

/// Index of the trigger that begins a tag, the shortest of several: it is complete first, and what follows is its tag.
pub(crate) fn trigger_of(tag: &StructuralTag, triggers: &[String]) -> Option<usize> {
    let begins = |(_, trigger): &(usize, &String)| tag.begin.starts_with(trigger.as_str());
    triggers.iter().enumerate().filter(begins).min_by_key(|(_, trigger)| trigger.len()).map(|(t, _)| t)
}

fn sequence(pieces: &[Piece<'_>]) -> String {
    let symbols = pieces.iter().map(|piece| match piece {
        Piece::Text(text) => literal(text),
        Piece::Special(id) => format!("<[{id}]>"),
    });
    symbols.collect::<Vec<_>>().join(" ")
}

/// Divides a text at the special tokens whose texts it has.
fn pieces<'a>(text: &'a str, special: &[(String, u32)]) -> Vec<Piece<'a>> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let found = special.iter().filter(|(name, _)| !name.is_empty());
        let found = found.filter_map(|(name, id)| Some((rest.find(name.as_str())?, name.len(), *id)));
        // The first one, and the longest of those that begin there.
        let Some((at, length, id)) = found.min_by_key(|&(at, length, _)| (at, std::cmp::Reverse(length)))
        else {
            pieces.push(Piece::Text(rest));
            break;
        };
        if at > 0 {
            pieces.push(Piece::Text(&rest[..at]));
        }
        pieces.push(Piece::Special(id));
        rest = &rest[at + length..];
    }
    pieces
}

#[cfg(test)]
mod tests;
