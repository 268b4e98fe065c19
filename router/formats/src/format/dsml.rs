//! DeepSeek V3.2 and V4: `<｜DSML｜function_calls>`, in it `<｜DSML｜invoke name="f">` with parameters that say whether
//! they are text. V4 names the block `tool_calls`; V4.1 writes a space inside each tag and names it ` calls`.

use std::sync::Arc;

use super::{CallFormat, Trigger};
use crate::{
    bodies::{Attributes, Tags, tagged_call},
    choice::WithoutTemplate,
    cursor::{Break, Cursor, Lexicon, Markers},
    grammar::{Grammar, Piece, TaggedValues},
    names::ParameterNames,
    output::Output,
    tools::Tools,
};

/// The family ships Python code that writes prompts.
pub(crate) const WITHOUT_TEMPLATE: WithoutTemplate = WithoutTemplate {
    token_part: "｜DSML｜",
    reason: "DeepSeek V3.2 and V4 come with an encoder in Python instead of a chat template, and it is not ported",
};

pub(crate) struct Dsml {
    tools: Arc<Tools>,
    block: Markers,
    name_end: Markers,
    tags: Tags,
}

const BLOCK_ENDS: [&str; 3] = ["</｜DSML｜function_calls>", "</｜DSML｜tool_calls>", "</｜DSML｜ calls>"];
const CALL_ENDS: [&str; 2] = ["</｜DSML｜invoke>", "</｜DSML｜ invoke>"];
const CALLS: [&str; 2] = ["<｜DSML｜invoke name=\"", "<｜DSML｜ invoke name=\""];
const PARAMETERS: [&str; 2] = ["<｜DSML｜parameter name=\"", "<｜DSML｜ parameter name=\""];

/// Text behind the name of a parameter.
const KEY_END: &str = "\"";

const VALUES: TaggedValues = TaggedValues {
    open: &[Piece::Marker(PARAMETERS[0])],
    before_text: &[Piece::Text("\" string=\"true\">")],
    before_json: &[Piece::Text("\" string=\"false\">")],
    close: ("", "</｜DSML｜parameter>"),
    behind: &[Piece::MaybeNewline],
};

impl CallFormat for Dsml {
    const TRIGGERS: &'static [Trigger] = &[
        Trigger::Marker("<｜DSML｜function_calls>"),
        Trigger::Marker("<｜DSML｜tool_calls>"),
        Trigger::Marker("<｜DSML｜ calls>"),
    ];
    const PARAMETER_NAMES: ParameterNames = ParameterNames::Before(KEY_END);

    fn new(lexicon: &mut Lexicon<'_>, tools: Arc<Tools>) -> Self {
        let between = || PARAMETERS.into_iter().chain(CALL_ENDS).chain(BLOCK_ENDS);
        Self {
            tools,
            block: lexicon.markers(BLOCK_ENDS.into_iter().chain(CALLS)),
            name_end: lexicon.markers(["\">"]),
            tags: Tags {
                between: lexicon.markers(between()),
                openings: PARAMETERS.len(),
                key_end: lexicon.markers([KEY_END]),
                attributes: Attributes::Typed(lexicon.markers([">"])),
                close: lexicon.markers(["</｜DSML｜parameter>", "</｜DSML｜ parameter>"]),
                followers: lexicon.markers(between()),
                framed: false,
            },
        }
    }

    fn grammar(grammar: &mut Grammar<'_>) {
        let block = |grammar: &Grammar<'_>, begin: &str, end: &str| {
            let calls = grammar.repeated("call", r#"("\n")?"#);
            format!(r#"{} ("\n")? {calls} ("\n")? {}"#, grammar.marker(begin), grammar.marker(end))
        };
        // The two names of the block. Versions that write spaces inside tags read these, too.
        let names = ["<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"].into_iter().zip(BLOCK_ENDS);
        let blocks: Vec<_> = names.map(|(begin, end)| block(grammar, begin, end)).collect();
        grammar.rule("calls", blocks.join(" | "));
        let (invoke, end) = (grammar.marker(CALLS[0]), grammar.marker(CALL_ENDS[0]));
        grammar.any_tool("call", |grammar, tool| {
            let (name, parameters) = (grammar.text(tool.name()), grammar.parameters(tool, &VALUES));
            format!(r#"{invoke} {name} "\">" ("\n")? {parameters} {end}"#)
        });
    }

    async fn read(&self, cursor: &Cursor, _: usize) -> Result<(), Break> {
        cursor.enter_block();
        while cursor.stream_until(&self.block, Output::text).await? >= BLOCK_ENDS.len() {
            let mut ends_block = false;
            cursor.attempt(self.invoke(cursor, &mut ends_block)).await?;
            if ends_block {
                break;
            }
        }
        Ok(())
    }
}

impl Dsml {
    async fn invoke(&self, cursor: &Cursor, ends_block: &mut bool) -> Result<(), Break> {
        let (name, _) = cursor.word_until(&self.name_end).await?;
        let end = tagged_call(cursor, &self.tags, &self.tools, &name).await?;
        *ends_block = end >= PARAMETERS.len() + CALL_ENDS.len();
        Ok(())
    }
}
