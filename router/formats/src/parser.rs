//! The parser of one output.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Waker},
};

use crate::{
    choice::Format,
    cursor::{Cursor, Lexicon, Vocabulary},
    event::Event,
    ids::Ids,
    output::{CallLimit, Channel, Output},
    reasoning::{Block, Reasoning},
    tools::Tools,
    turn::{Calls, Thinking},
};

/// The forms of calls and reasoning that a model writes. Chosen once per model.
#[derive(Clone, Debug, Default)]
pub struct Dialect {
    /// The format of calls. Without one, all calls are text.
    pub format: Option<Format>,
    /// The markers of reasoning. Without them, all reasoning is content.
    pub reasoning: Option<Reasoning>,
    /// The tokens that may be markers.
    pub vocabulary: Vocabulary,
}

/// The facts of one request that its parser needs.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The declared tools.
    pub tools: Arc<Tools>,
    /// Whether calls are events or text; text for `tool_choice: "none"`.
    pub calls: Calls,
    /// Whether calls inside a block of reasoning are events or text. As events, they are found although the model
    /// forgets to close its block; as text, a model may quote them while it thinks.
    pub calls_in_reasoning: Calls,
    /// The number of calls.
    pub limit: CallLimit,
    /// The state of the block of reasoning behind the prompt.
    pub block: Block,
    /// Random number from which ids are made.
    pub id_seed: u64,
    /// Number of calls in the conversation, for families that count them in their ids.
    pub earlier_calls: usize,
}

/// The reading of an output, suspended between its pieces.
pub(crate) type Reading = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The parts from which a format is made.
pub(crate) struct Making<'a, 'v> {
    pub lexicon: &'a mut Lexicon<'v>,
    pub tools: Arc<Tools>,
    pub thinking: Thinking,
    pub calls: Calls,
    pub cursor: Cursor,
}

/// Turns one output into events.
///
/// Takes each token with the text that the detokenizer releases for it. How the text is divided among the tokens
/// changes no event, apart from the cuts between texts of one kind.
pub struct Parser {
    cursor: Cursor,
    /// `None` once it has read all.
    reading: Option<Reading>,
    reasoning_tokens: u32,
}

impl Dialect {
    /// Creates the parser of an output without tokens.
    pub fn parser(&self, request: Request) -> Parser {
        let ids = Ids {
            style: self.format.map(Format::ids).unwrap_or_default(),
            seed: request.id_seed,
            earlier_calls: request.earlier_calls,
        };
        let mut output = Output::new(ids, request.limit);
        if self.reasoning.is_some() && request.block == Block::Open {
            output.switch(Channel::Reasoning);
        }
        let cursor = Cursor::new(output);
        let mut lexicon = Lexicon::new(&self.vocabulary);
        let reading = Format::read(
            self.format,
            Making {
                lexicon: &mut lexicon,
                tools: request.tools,
                thinking: Thinking {
                    markers: self.reasoning,
                    block: request.block,
                    calls: request.calls_in_reasoning,
                },
                calls: request.calls,
                cursor: cursor.clone(),
            },
        );
        cursor.watch(lexicon.tokens);
        Parser { cursor, reading: Some(reading), reasoning_tokens: 0 }
    }
}

impl Parser {
    /// True if the token is a marker. The detokenizer has to release what it holds before a marker: the rest of a
    /// broken character belongs before it. It may leave the marker's own text out, as it does with special tokens.
    pub fn is_marker(&self, token: u32) -> bool {
        self.cursor.is_marker(token)
    }

    /// Takes the next token and the text that it releases. Returns the events that are certain by now.
    pub fn push(&mut self, token: u32, text: &str) -> Vec<Event> {
        if self.is_done() {
            return Vec::new();
        }
        let was_reasoning = self.is_reasoning();
        self.cursor.push(token, text);
        self.read();
        self.reasoning_tokens += u32::from(was_reasoning || self.is_reasoning());
        self.cursor.output(Output::take)
    }

    /// Takes the end of the output, for whatever reason it ends, and the text that the detokenizer releases there.
    /// Returns the remaining events.
    ///
    /// A possible beginning of a marker is text. A call that has begun stays as far as it goes, without
    /// [`Event::CallEnd`]. A call that has not begun, because its name is not whole, is text.
    pub fn finish(mut self, text: &str) -> Vec<Event> {
        if !self.is_done() {
            self.cursor.push_text(text);
            self.cursor.end();
            self.read();
            self.cursor.output(Output::finish);
        }
        self.cursor.output(Output::take)
    }

    /// True if nothing may follow, because the output has its only call: the request can end.
    pub fn is_done(&self) -> bool {
        self.cursor.output(|output| output.is_closed())
    }

    /// True inside a block of reasoning.
    pub fn is_reasoning(&self) -> bool {
        self.cursor.output(|output| output.channel == Channel::Reasoning)
    }

    /// Number of tokens of the reasoning, with its markers.
    pub fn reasoning_tokens(&self) -> u32 {
        self.reasoning_tokens
    }

    /// Number of bytes that the parser has looked at, which tests compare with the length of the output.
    pub fn examined_bytes(&self) -> u64 {
        self.cursor.examined()
    }

    /// Number of bytes of the output that the parser keeps, which tests compare with its bounds.
    pub fn kept_bytes(&self) -> usize {
        self.cursor.kept()
    }

    fn read(&mut self) {
        if let Some(reading) = &mut self.reading
            && reading.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
        {
            self.reading = None;
        }
    }
}
