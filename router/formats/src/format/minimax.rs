//! MiniMax M2: `<minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke></minimax:tool_call>`.

use std::sync::Arc;

use super::{CallFormat, Trigger};
use crate::{
    bodies::{Attributes, Tags, tagged_call},
    cursor::{Break, Cursor, Lexicon, Markers},
    grammar::{Grammar, Piece, TaggedValues},
    names::ParameterNames,
    output::Output,
    tools::Tools,
};

pub(crate) struct MiniMax {
    tools: Arc<Tools>,
    block: Markers,
    name_end: Markers,
    tags: Tags,
}

/// Position of the block's end in `block`, and among the markers between parameters.
const BLOCK_END: usize = 0;
const BLOCK_END_IN_CALL: usize = 2;

/// Text behind the name of a parameter.
const KEY_END: &str = "\">";

const VALUES: TaggedValues = TaggedValues {
    open: &[Piece::Marker("<parameter name=\"")],
    before_text: &[Piece::Text("\">")],
    before_json: &[Piece::Text("\">")],
    close: ("", "</parameter>"),
    behind: &[Piece::MaybeNewline],
};

impl CallFormat for MiniMax {
    const TRIGGERS: &'static [Trigger] = &[Trigger::Marker("<minimax:tool_call>")];
    const PARAMETER_NAMES: ParameterNames = ParameterNames::Before(KEY_END);

    fn new(lexicon: &mut Lexicon<'_>, tools: Arc<Tools>) -> Self {
        let between = ["<parameter name=\"", "</invoke>", "</minimax:tool_call>"];
        Self {
            tools,
            block: lexicon.markers(["</minimax:tool_call>", "<invoke name=\""]),
            name_end: lexicon.markers(["\">"]),
            tags: Tags {
                between: lexicon.markers(between),
                openings: 1,
                key_end: lexicon.markers([KEY_END]),
                attributes: Attributes::None,
                close: lexicon.markers(["</parameter>"]),
                followers: lexicon.markers(between),
                framed: false,
            },
        }
    }

    fn grammar(grammar: &mut Grammar<'_>) {
        let (open, close) = (grammar.marker("<minimax:tool_call>"), grammar.marker("</minimax:tool_call>"));
        let calls = grammar.repeated("call", r#"("\n")?"#);
        grammar.rule("calls", format!(r#"{open} ("\n")? {calls} ("\n")? {close}"#));
        let (invoke, end) = (grammar.marker("<invoke name=\""), grammar.marker("</invoke>"));
        grammar.any_tool("call", |grammar, tool| {
            let (name, parameters) = (grammar.text(tool.name()), grammar.parameters(tool, &VALUES));
            format!(r#"{invoke} {name} "\">" ("\n")? {parameters} {end}"#)
        });
    }

    async fn read(&self, cursor: &Cursor, _: usize) -> Result<(), Break> {
        cursor.enter_block();
        while cursor.stream_until(&self.block, Output::text).await? != BLOCK_END {
            let mut ends_block = false;
            cursor.attempt(self.invoke(cursor, &mut ends_block)).await?;
            if ends_block {
                break;
            }
        }
        Ok(())
    }
}

impl MiniMax {
    async fn invoke(&self, cursor: &Cursor, ends_block: &mut bool) -> Result<(), Break> {
        let (name, _) = cursor.word_until(&self.name_end).await?;
        *ends_block = tagged_call(cursor, &self.tags, &self.tools, &name).await? == BLOCK_END_IN_CALL;
        Ok(())
    }
}
