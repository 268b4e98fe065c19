//! The formats in which models write tool calls and reasoning, and one streaming parser for all of them.
//!
//! A model writes one text. Markers in it set reasoning and calls off from content, and each family of models has its
//! own. This crate turns the tokens of an output into [`Event`]s as they arrive:
//!
//! ```text
//! use tutti_formats::{Answer, Dialect, Event, Format, Reasoning, Request, Vocabulary};
//!
//! let template = "… <tool_call>{\"name\": …, \"arguments\": …}</tool_call> … </think> …";
//! let dialect = Dialect {
//!     format: Some(Format::choose("auto", Some(template))?),
//!     reasoning: Reasoning::choose("auto", Some(template))?,
//!     vocabulary: Vocabulary::from_iter([("<tool_call>".to_owned(), 7), ("</tool_call>".to_owned(), 8)]),
//! };
//! let mut parser = dialect.parser(Request::default());
//! let mut answer = Answer::default();
//! let output = [(1, "I look."), (7, "<tool_call>"), (2, "{\"name\": \"now\""), (3, "}"), (8, "</tool_call>")];
//! for (token, text) in output {
//!     answer.extend(parser.push(token, text));
//! }
//! answer.extend(parser.finish(""));
//! assert_eq!(answer.content, "I look.");
//! assert_eq!((answer.calls[0].name.as_str(), answer.calls[0].arguments.as_str()), ("now", "{}"));
//! ```
//!
//! # How an output is read
//!
//! | module | idea |
//! | --- | --- |
//! | `cursor` | the text that has arrived; a reader waits where a byte is missing |
//! | `turn` | content, blocks of reasoning and calls, in any order |
//! | `format` | one file per family: the calls, written down like a grammar |
//! | `bodies` | what families share: JSON with a name in it, JSON behind a name, tagged parameters |
//! | `names` | the names of tools and parameters that a format carries |
//! | `output` | events; white space that belongs to the format |
//! | `grammar` | the same calls as a grammar, for requests whose calls are enforced |
//! | `choice` | the table of formats, with the signs by which a chat template shows its format |
//!
//! Readers are `async` functions without a runtime: [`Parser::push`] polls them once. A format so keeps its state in
//! its local variables and needs no table of states.
//!
//! # What holds for each format
//!
//! - The events do not depend on how the text is divided among the tokens. The whole [`Answer`] is the sum of the
//!   events of the stream, so that a streamed and a whole answer have one source.
//! - The work is linear in the output: a consumed byte is not looked at again. What is held is bounded: the longest end
//!   that may begin a marker, a call's header until its name is whole, and a typed parameter until it is whole.
//!   `limits` has the bounds, and what happens to an output that passes one.
//! - Text is not lost. A call that turns out to be none is content, with its markers as the model wrote them. A call
//!   that has begun keeps what the model wrote up to its end, sound or not, and a call that the end of the output cuts
//!   has no [`Event::CallEnd`].
//! - A marker that is a token of the tokenizer is found by its id, any other one by its text. Inside strings of JSON, a
//!   marker is text. Inside a parameter between tags, a closing tag is text unless its format goes on behind it.
//! - JSON keeps the model's bytes: the order of keys, and the spelling of numbers. Parameters between tags are typed by
//!   the tool's schema: text streams, and other values are written once they are whole.
//!
//! # How a format is added
//!
//! A family has a file in `format`, a row in the table of `choice`, and a sample in `tests/formats/samples.rs`, on
//! which the tests of all formats run.
//!
//! # What the caller does
//!
//! Stop strings match content, so they are looked for in [`Event::Content`] and never in reasoning or arguments. The
//! reason of an output's end is `tool_calls` if it has calls, unless a limit cut it. A caller that leaves special
//! tokens out of the text flushes its detokenizer before a token that [`Parser::is_marker`].

mod bodies;
mod choice;
mod cursor;
mod event;
mod format;
mod grammar;
mod ids;
mod json;
mod limits;
mod names;
mod output;
mod parser;
mod reasoning;
mod tools;
mod turn;

pub use self::{
    choice::{Format, Refusal},
    cursor::Vocabulary,
    event::{Answer, Call, Event},
    grammar::{LongGrammar, ToolGrammar, Wanted},
    names::{NAME_CHARS, NameRefusal, is_name_char},
    output::CallLimit,
    parser::{Dialect, Parser, Request},
    reasoning::{Block, Reasoning},
    tools::Tools,
    turn::Calls,
};
