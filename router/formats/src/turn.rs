//! A turn of most families: content, blocks of reasoning, and calls in any order.

use crate::{
    cursor::{Break, Cursor, Lexicon, Markers},
    format::{CallFormat, Trigger},
    output::{Channel, Output},
    reasoning::{Block, Reasoning},
};

/// Whether a call that a model writes is an event or text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Calls {
    /// Events of their own.
    #[default]
    Events,
    /// Text of the present channel.
    Text,
}

/// The reader of a turn in a format.
pub(crate) struct Turn<F> {
    format: F,
    content: ChannelMarkers,
    reasoning: ChannelMarkers,
}

/// The markers of a channel.
struct ChannelMarkers {
    /// Triggers that are found before any text of the channel.
    start: Set,
    /// Triggers that are found anywhere.
    anywhere: Set,
}

/// Markers and their meanings, in the same order.
struct Set {
    markers: Markers,
    meanings: Vec<Meaning>,
}

#[derive(Clone, Copy)]
enum Meaning {
    OpenBlock,
    CloseBlock,
    /// The format's trigger of this position.
    Call(usize),
}

/// The part of a request that a turn depends on.
#[derive(Clone, Copy)]
pub(crate) struct Thinking {
    pub markers: Option<Reasoning>,
    pub block: Block,
    pub calls: Calls,
}

impl<F: CallFormat> Turn<F> {
    pub fn new(lexicon: &mut Lexicon<'_>, format: F, thinking: Thinking) -> Self {
        let reasoning = thinking.markers.filter(|_| thinking.block != Block::Closed);
        // A text that begins calls and with which a marker of reasoning begins cannot be told from it. No family has
        // both.
        let is_clear = |text: &str, meaning: Meaning| {
            let begins = |marker: &str| marker.starts_with(text);
            !matches!(meaning, Meaning::Call(_))
                || reasoning.is_none_or(|reasoning| !begins(reasoning.open) && !begins(reasoning.close))
        };
        let mut set = |is_wanted: &dyn Fn(&Lexicon<'_>, Meaning, &str) -> bool| {
            let block = reasoning.into_iter().flat_map(|reasoning| {
                [(reasoning.open, Meaning::OpenBlock), (reasoning.close, Meaning::CloseBlock)]
            });
            let calls = F::TRIGGERS.iter().enumerate().map(|(position, trigger)| {
                let (Trigger::Marker(text) | Trigger::Start(text)) = trigger;
                (*text, Meaning::Call(position))
            });
            let wanted: Vec<_> = block
                .chain(calls)
                .filter(|(text, meaning)| is_clear(text, *meaning) && is_wanted(lexicon, *meaning, text))
                .collect();
            Set {
                markers: lexicon.markers(wanted.iter().map(|(text, _)| *text)),
                meanings: wanted.iter().map(|(_, meaning)| *meaning).collect(),
            }
        };
        let is_marker = |position: usize| matches!(F::TRIGGERS[position], Trigger::Marker(_));
        let calls_in_reasoning = thinking.calls == Calls::Events;
        // A marker of reasoning that is no token counts where a block may begin or end. Elsewhere it is text.
        Self {
            format,
            content: ChannelMarkers {
                start: set(&|lexicon, meaning, text| match meaning {
                    Meaning::OpenBlock | Meaning::Call(_) => true,
                    Meaning::CloseBlock => lexicon.is_token(text),
                }),
                anywhere: set(&|lexicon, meaning, text| match meaning {
                    Meaning::OpenBlock | Meaning::CloseBlock => lexicon.is_token(text),
                    Meaning::Call(position) => is_marker(position),
                }),
            },
            reasoning: ChannelMarkers {
                start: set(&|_, meaning, _| match meaning {
                    Meaning::OpenBlock | Meaning::CloseBlock => true,
                    Meaning::Call(position) => calls_in_reasoning && is_marker(position),
                }),
                anywhere: set(&|lexicon, meaning, text| match meaning {
                    Meaning::OpenBlock => lexicon.is_token(text),
                    Meaning::CloseBlock => true,
                    Meaning::Call(position) => calls_in_reasoning && is_marker(position),
                }),
            },
        }
    }

    /// Reads up to the end of the output.
    pub async fn read(&self, cursor: &Cursor) -> Result<(), Break> {
        loop {
            let (channel, at_edge) = cursor.output(|output| (output.channel, output.at_edge()));
            let markers = match channel {
                Channel::Content => &self.content,
                Channel::Reasoning => &self.reasoning,
            };
            match self.next(cursor, markers, at_edge).await? {
                Meaning::OpenBlock if channel == Channel::Content => {
                    cursor.output(|output| output.switch(Channel::Reasoning));
                }
                Meaning::CloseBlock if channel == Channel::Reasoning => {
                    cursor.output(|output| output.switch(Channel::Content));
                }
                // A marker that repeats the present state says nothing.
                Meaning::OpenBlock | Meaning::CloseBlock => {}
                Meaning::Call(trigger) => cursor.attempt(self.format.read(cursor, trigger)).await?,
            }
        }
    }

    /// Passes text on up to the next marker.
    async fn next(&self, cursor: &Cursor, markers: &ChannelMarkers, at_edge: bool) -> Result<Meaning, Break> {
        if at_edge {
            cursor.pass_blank().await?;
            if let Some(marker) = cursor.next_marker(&markers.start.markers).await {
                return Ok(markers.start.meanings[marker]);
            }
        }
        let marker = cursor.stream_until(&markers.anywhere.markers, Output::text).await?;
        Ok(markers.anywhere.meanings[marker])
    }
}
