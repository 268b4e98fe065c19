//! gpt-oss: messages of the form `<|start|>assistant<|channel|>NAME to=functions.f
//! <|constrain|>json<|message|>…<|end|>`.
//!
//! The channel `analysis` is the reasoning, and any other one is content. A recipient `functions.f` makes the message a
//! call, on any channel. Slips of the model have a result: text outside messages is content, markers without a message
//! vanish, and a message for an unknown recipient is text of its channel.

use crate::{
    bodies::tool_name,
    cursor::{Break, Cursor, Lexicon, Markers},
    grammar::Grammar,
    limits::MAX_NAME,
    output::{Channel, Output},
};

/// The reader of outputs in harmony.
pub(crate) struct Harmony {
    /// All markers; those that begin a message first.
    markers: Markers,
    /// Markers of a header.
    header: Markers,
    /// False if calls are to stay text.
    reads_calls: bool,
}

/// Number of markers that begin a message.
const BEGINNINGS: usize = 3;
/// Positions in both sets.
const MESSAGE: usize = 0;
const CHANNEL: usize = 1;

/// The header of a message.
#[derive(Default)]
struct Header {
    channel: String,
    recipient: String,
}

impl Harmony {
    pub fn new(lexicon: &mut Lexicon<'_>, reads_calls: bool) -> Self {
        let beginnings = ["<|message|>", "<|channel|>", "<|start|>"];
        let ends = ["<|end|>", "<|call|>", "<|return|>"];
        Self {
            markers: lexicon.markers(beginnings.into_iter().chain(ends)),
            header: lexicon.markers(["<|message|>", "<|channel|>", "<|constrain|>"]),
            reads_calls,
        }
    }

    /// Writes the rule `calls`: reasoning that may be left out, then calls.
    pub fn grammar(grammar: &mut Grammar<'_>) {
        let marker = |text| grammar.marker(text);
        let (channel, message, constrain) =
            (marker("<|channel|>"), marker("<|message|>"), marker("<|constrain|>"));
        let next = format!(r#"{} {} "assistant""#, marker("<|end|>"), marker("<|start|>"));
        // Behind a call the model waits for its result.
        grammar.rule("calls", "reasoning? call");
        grammar.rule("reasoning", format!(r#"{channel} "analysis" {message} FREE {next}"#));
        grammar.any_tool("call", |grammar, tool| {
            let to = grammar.text(&format!("commentary to=functions.{}", tool.name()));
            let json = grammar.arguments(tool);
            format!(r#"{channel} {to} (" " {constrain} "json")? {message} {json}"#)
        });
    }

    /// Reads messages up to the end of the output.
    pub async fn read(&self, cursor: &Cursor) -> Result<(), Break> {
        let mut marker = cursor.stream_until(&self.markers, Output::text).await?;
        loop {
            let mut next = None;
            if marker < BEGINNINGS {
                cursor.attempt(self.message(cursor, marker, &mut next)).await?;
                cursor.output(|output| output.switch(Channel::Content));
            }
            marker = match next {
                Some(next) => next,
                None => cursor.stream_until(&self.markers, Output::text).await?,
            };
        }
    }

    /// Reads a message behind its first marker. The marker behind its body is `next`.
    async fn message(&self, cursor: &Cursor, first: usize, next: &mut Option<usize>) -> Result<(), Break> {
        let header = self.header(cursor, first).await?;
        cursor.enter_block();
        if let (true, Some(name)) = (self.reads_calls, header.recipient.strip_prefix("functions.")) {
            return self.call(cursor, tool_name(name)?, next).await;
        }
        if header.channel == "analysis" {
            cursor.output(|output| output.switch(Channel::Reasoning));
        }
        *next = Some(cursor.stream_until(&self.markers, Output::text).await?);
        Ok(())
    }

    async fn header(&self, cursor: &Cursor, first: usize) -> Result<Header, Break> {
        let mut header = Header::default();
        let mut marker = first;
        let mut length = 0;
        while marker != MESSAGE {
            let (text, end) = cursor.word_until(&self.header).await?;
            length += text.len();
            if length > MAX_NAME {
                return Err(Break::Malformed);
            }
            for (position, word) in text.split_whitespace().enumerate() {
                if let Some(recipient) = word.strip_prefix("to=") {
                    header.recipient = recipient.to_owned();
                } else if marker == CHANNEL && position == 0 {
                    header.channel = word.to_owned();
                }
            }
            marker = end;
        }
        Ok(header)
    }

    /// Reads a call's body. What is no JSON is passed on as it is.
    async fn call(&self, cursor: &Cursor, name: String, next: &mut Option<usize>) -> Result<(), Break> {
        cursor.begin_call(name, None);
        cursor.skip_blank().await?;
        if cursor.peek().await? == '{' {
            cursor.json(Output::arguments).await?;
            cursor.end_call();
            *next = Some(cursor.stream_until(&self.markers, Output::text).await?);
            return Ok(());
        }
        let mut is_empty = true;
        let body = cursor.stream_until(&self.markers, |output, text| {
            is_empty &= text.is_empty();
            output.arguments(text);
        });
        *next = Some(body.await?);
        cursor.arguments(if is_empty { "{}" } else { "" });
        cursor.end_call();
        Ok(())
    }
}
