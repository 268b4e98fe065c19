//! GLM-4.5 to 5: `<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`, before 4.7 with newlines
//! between.

use std::sync::Arc;

use super::{CallFormat, Trigger};
use crate::{
    bodies::{Attributes, Tags, tagged_call},
    cursor::{Break, Cursor, Lexicon, Markers},
    grammar::{Grammar, Piece, TaggedValues},
    names::ParameterNames,
    tools::Tools,
};

pub(crate) struct Glm {
    tools: Arc<Tools>,
    name_end: Markers,
    tags: Tags,
}

const BEFORE_VALUE: &[Piece] =
    &[Piece::Marker("</arg_key>"), Piece::MaybeNewline, Piece::Marker("<arg_value>")];

/// Text behind the name of a parameter.
const KEY_END: &str = "</arg_key>";

const VALUES: TaggedValues = TaggedValues {
    open: &[Piece::Marker("<arg_key>")],
    before_text: BEFORE_VALUE,
    before_json: BEFORE_VALUE,
    close: ("", "</arg_value>"),
    behind: &[Piece::MaybeNewline],
};

impl CallFormat for Glm {
    const TRIGGERS: &'static [Trigger] = &[Trigger::Marker("<tool_call>")];
    const PARAMETER_NAMES: ParameterNames = ParameterNames::Before(KEY_END);

    fn new(lexicon: &mut Lexicon<'_>, tools: Arc<Tools>) -> Self {
        let between = ["<arg_key>", "</tool_call>"];
        Self {
            tools,
            name_end: lexicon.markers(between),
            tags: Tags {
                between: lexicon.markers(between),
                openings: 1,
                key_end: lexicon.markers([KEY_END]),
                attributes: Attributes::Opening(lexicon.markers(["<arg_value>"])),
                close: lexicon.markers(["</arg_value>"]),
                followers: lexicon.markers(between),
                framed: false,
            },
        }
    }

    fn grammar(grammar: &mut Grammar<'_>) {
        let (open, close) = (grammar.marker("<tool_call>"), grammar.marker("</tool_call>"));
        grammar.rule("calls", grammar.repeated("call", r#"("\n")?"#));
        grammar.rule("call", format!("{open} function {close}"));
        grammar.any_tool("function", |grammar, tool| {
            let (name, parameters) = (grammar.text(tool.name()), grammar.parameters(tool, &VALUES));
            format!(r#"{name} ("\n")? {parameters}"#)
        });
    }

    async fn read(&self, cursor: &Cursor, _: usize) -> Result<(), Break> {
        let name = cursor.word_before(&self.name_end).await?;
        tagged_call(cursor, &self.tags, &self.tools, &name).await.map(|_| ())
    }
}
