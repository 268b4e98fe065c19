//! Qwen3-Coder, Qwen3.5 and later, Nemotron 3:
//! `<tool_call>\n<function=f>\n<parameter=k>\nvalue\n</parameter>\n</function>\n</tool_call>`.
//!
//! Models leave out `<tool_call>` at times, and then still write the closing marker.

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

pub(crate) struct Qwen {
    tools: Arc<Tools>,
    function: Markers,
    name_end: Markers,
    tags: Tags,
    block: Markers,
    close: Markers,
}

/// Position of the trigger `<tool_call>`.
const BLOCK: usize = 0;
/// Position of `<function=` in `block`.
const FUNCTION: usize = 1;
/// Position of `</tool_call>` among the markers between parameters.
const BLOCK_END: usize = 2;

/// Text behind the name of a parameter.
const KEY_END: &str = ">";

const VALUES: TaggedValues = TaggedValues {
    open: &[Piece::Marker("<parameter=")],
    before_text: &[Piece::Text(">\n")],
    before_json: &[Piece::Text(">\n")],
    close: ("\n", "</parameter>"),
    behind: &[Piece::Text("\n")],
};

impl CallFormat for Qwen {
    const TRIGGERS: &'static [Trigger] = &[Trigger::Marker("<tool_call>"), Trigger::Marker("<function=")];
    const PARAMETER_NAMES: ParameterNames = ParameterNames::Before(KEY_END);

    fn new(lexicon: &mut Lexicon<'_>, tools: Arc<Tools>) -> Self {
        Self {
            tools,
            function: lexicon.markers(["<function="]),
            name_end: lexicon.markers([">"]),
            tags: Tags {
                between: lexicon.markers(["<parameter=", "</function>", "</tool_call>"]),
                openings: 1,
                key_end: lexicon.markers([KEY_END]),
                attributes: Attributes::None,
                close: lexicon.markers(["</parameter>"]),
                followers: lexicon.markers(["<parameter=", "</function>", "</tool_call>"]),
                framed: true,
            },
            block: lexicon.markers(["</tool_call>", "<function="]),
            close: lexicon.markers(["</tool_call>"]),
        }
    }

    fn grammar(grammar: &mut Grammar<'_>) {
        let marker = |text| grammar.marker(text);
        let (open, close, end) = (marker("<tool_call>"), marker("</tool_call>"), marker("</function>"));
        let function = marker("<function=");
        grammar.rule("calls", grammar.repeated("call", r#""\n""#));
        grammar.rule("call", format!(r#"{open} "\n" function "\n" {close}"#));
        grammar.any_tool("function", |grammar, tool| {
            let (name, parameters) = (grammar.text(tool.name()), grammar.parameters(tool, &VALUES));
            format!(r#"{function} {name} ">\n" {parameters} {end}"#)
        });
    }

    async fn read(&self, cursor: &Cursor, trigger: usize) -> Result<(), Break> {
        if trigger != BLOCK {
            self.function(cursor).await?;
            cursor.skip_blank().await?;
            cursor.next_marker(&self.close).await;
            return Ok(());
        }
        cursor.skip_blank().await?;
        cursor.next_marker(&self.function).await.ok_or(Break::Malformed)?;
        if self.function(cursor).await? == BLOCK_END {
            return Ok(());
        }
        while cursor.stream_until(&self.block, Output::text).await? == FUNCTION {
            let mut end = 0;
            cursor.attempt(async { self.function(cursor).await.map(|marker| end = marker) }).await?;
            if end == BLOCK_END {
                break;
            }
        }
        Ok(())
    }
}

impl Qwen {
    /// Reads a call behind `<function=`. Returns the position of its end among the markers between parameters.
    async fn function(&self, cursor: &Cursor) -> Result<usize, Break> {
        let (name, _) = cursor.word_until(&self.name_end).await?;
        tagged_call(cursor, &self.tags, &self.tools, &name).await
    }
}
