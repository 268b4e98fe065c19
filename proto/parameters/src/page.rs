//! The parameter tables of `docs/api.md`, made from the declaration.

use std::fmt::Write;

use crate::table::{Absent, Kind, Parameter, Scope, Standing, all};

const BEGIN: &str =
    "<!-- Made from proto/parameters: `UPDATE_PAGE=1 cargo test -p tutti-parameters` writes it again. -->\n";
const END: &str = "<!-- End of what is made. -->\n";

/// A table of the page.
struct Section {
    title: &'static str,
    has: fn(&Parameter) -> bool,
}

const SECTIONS: [Section; 4] = [
    Section {
        title: "Both routes",
        has: |parameter| is_in(parameter, Scope::Completions) && is_in_chat(parameter),
    },
    Section {
        title: "`/v1/completions`",
        has: |parameter| is_in(parameter, Scope::Completions) && !is_in_chat(parameter),
    },
    Section {
        title: "`/v1/chat/completions`",
        has: |parameter| !is_in(parameter, Scope::Completions) && is_in_chat(parameter),
    },
    Section {
        title: "`/tokenize` and `/detokenize`",
        has: |parameter| is_in(parameter, Scope::Tokenize) || is_in(parameter, Scope::Detokenize),
    },
];

fn is_in(parameter: &Parameter, scope: Scope) -> bool {
    // The parameters of `stream_options` apply to both routes.
    parameter.scopes.contains(&scope)
        || parameter.scopes == [Scope::StreamOptions] && scope == Scope::Completions
}

fn is_in_chat(parameter: &Parameter) -> bool {
    let objects = [Scope::Chat, Scope::StreamOptions, Scope::Message];
    objects.iter().any(|scope| parameter.scopes.contains(scope))
}

/// Returns the tables, each with its heading.
pub fn page() -> String {
    let mut page = String::new();
    for section in &SECTIONS {
        // Writing to a String cannot fail.
        let _ = writeln!(
            page,
            "### {}\n\n| Parameter | | Range and default | Notes |\n|---|---|---|---|",
            section.title
        );
        let mut rows: Vec<(String, Row)> = Vec::new();
        for parameter in all().filter(|parameter| (section.has)(parameter)) {
            let (name, row) = (name(parameter), Row::of(parameter));
            // Neighbouring parameters with the same text share a row.
            match rows.last_mut() {
                Some((names, last)) if *last == row => *names += &format!(", {name}"),
                _ => rows.push((name, row)),
            }
        }
        for (names, row) in rows {
            let Row { standing, range, note } = row;
            let _ = writeln!(page, "| {names} | {standing} | {range} | {note} |");
        }
        page.push('\n');
    }
    page
}

/// Returns the text of a page with new tables; `None` if the page lacks the markers around the tables.
pub fn update(text: &str) -> Option<String> {
    let (before, rest) = text.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some([before, BEGIN, "\n", &page(), END, after].concat())
}

fn name(parameter: &Parameter) -> String {
    let object = match parameter.scopes {
        [Scope::StreamOptions] => "stream_options.",
        [Scope::Message] => "messages[].",
        _ => "",
    };
    format!("`{object}{}`", parameter.name)
}

#[derive(PartialEq)]
struct Row {
    standing: &'static str,
    range: String,
    note: String,
}

impl Row {
    fn of(parameter: &Parameter) -> Self {
        match parameter.standing {
            Standing::Honoured => {
                let parts = [range(parameter.kind), absent(parameter.absent)];
                let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
                Self { standing: "honoured", range: parts.join(", "), note: parameter.note.into() }
            }
            Standing::Refused { why, harmless } => {
                let passes = match harmless {
                    [] => String::new(),
                    [value] => format!("`{value}` passes"),
                    values => format!("`{}` pass", values.join("` and `")),
                };
                Self { standing: "refused", range: passes, note: why.into() }
            }
            Standing::RefusedUnless(what) => {
                Self { standing: "refused", range: format!("{what} passes"), note: parameter.note.into() }
            }
            Standing::Ignored => {
                Self { standing: "ignored", range: String::new(), note: parameter.note.into() }
            }
        }
    }
}

fn range(kind: Kind) -> String {
    match kind {
        Kind::Number(range) if range.excludes_low => format!("above {}, up to {}", range.low, range.high),
        Kind::Number(range) => format!("{} to {}", range.low, range.high),
        Kind::Integer(range) if range.high == i64::from(u32::MAX) => String::new(),
        Kind::Integer(range) => format!("{} to {}", range.low, range.high),
        Kind::Seed => "any 64-bit integer".into(),
        Kind::Stops => {
            let (texts, bytes) = (crate::STOPS.range.most, crate::STOP_BYTES.range.most);
            format!("a string or up to {texts}, each up to {bytes} bytes")
        }
        Kind::TokenIds(Some(count)) => format!("up to {}", count.most),
        Kind::Biases(count, each) => {
            format!("{} to {} each, at most {} {}", each.low, each.high, count.most, count.items)
        }
        Kind::Object => "an object".into(),
        Kind::Prompt => "a text, a list of token ids, or a list of either".into(),
        Kind::Content => "a text or a list of parts".into(),
        Kind::TextOrObject => "a text or an object".into(),
        Kind::Boolean | Kind::Text | Kind::TokenIds(None) | Kind::Objects | Kind::Any => String::new(),
    }
}

fn absent(absent: Absent) -> String {
    match absent {
        Absent::NoEffect => String::new(),
        Absent::Refused => "required".into(),
        Absent::Number(value) => format!("default {value}"),
        Absent::Boolean(value) => format!("default {value}"),
        Absent::Means(words) => format!("default: {words}"),
    }
}

#[cfg(test)]
mod tests;
