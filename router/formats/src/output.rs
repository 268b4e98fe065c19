//! The events of an output: what belongs to which channel, and which white space belongs to none.

use crate::{event::Event, ids::Ids, limits::MAX_BLANK};

/// The channel to which text outside calls belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Channel {
    Content,
    Reasoning,
}

/// The kind of text or event before the text that comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    /// The beginning of the output.
    Start,
    /// The beginning or the end of a block of reasoning.
    Block,
    /// A call.
    Call,
    /// Text of the same channel.
    Text,
}

/// Number of calls that an output may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CallLimit {
    /// Any number.
    #[default]
    None,
    /// One: the output ends with its first call, as for `parallel_tool_calls: false`.
    One,
}

/// Collects events.
///
/// White space at an edge is the format's and not the model's text: what stands around the markers of reasoning, and
/// what stands between calls, before the first one or behind the last one, unless there is text on the same side.
pub(crate) struct Output {
    events: Vec<Event>,
    pub channel: Channel,
    before: Before,
    /// White space that waits for what follows.
    blank: String,
    ids: Ids,
    limit: CallLimit,
    /// Number of calls that have begun.
    begun: usize,
    /// True inside a call.
    in_call: bool,
    /// True once nothing may follow.
    closed: bool,
}

impl Output {
    pub fn new(ids: Ids, limit: CallLimit) -> Self {
        Self {
            events: Vec::new(),
            channel: Channel::Content,
            before: Before::Start,
            blank: String::new(),
            ids,
            limit,
            begun: 0,
            in_call: false,
            closed: false,
        }
    }

    /// True if the channel has no text since its beginning or the last call.
    pub fn at_edge(&self) -> bool {
        self.before != Before::Text
    }

    pub fn in_call(&self) -> bool {
        self.in_call
    }

    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Text of the present channel.
    pub fn text(&mut self, text: &str) {
        match self.channel {
            Channel::Content => self.content(text),
            Channel::Reasoning => self.reasoning(text),
        }
    }

    fn content(&mut self, text: &str) {
        if self.before == Before::Text {
            return self.emit(Event::Content(text.to_owned()));
        }
        let words = text.trim_start();
        if self.before != Before::Block {
            self.blank.push_str(&text[..text.len() - words.len()]);
        }
        if !words.is_empty() || self.blank.len() > MAX_BLANK {
            let blank = std::mem::take(&mut self.blank);
            self.before = Before::Text;
            self.emit(Event::Content(blank + words));
        }
    }

    fn reasoning(&mut self, text: &str) {
        let text = if self.before == Before::Text { text } else { text.trim_start() };
        if text.is_empty() {
            return;
        }
        self.before = Before::Text;
        let words = text.trim_end();
        let blank = &text[words.len()..];
        if !words.is_empty() || self.blank.len() + blank.len() > MAX_BLANK {
            let waited = std::mem::take(&mut self.blank);
            let ready = if words.is_empty() { text } else { words };
            self.emit(Event::Reasoning(waited + ready));
            if words.is_empty() {
                return;
            }
        }
        self.blank.push_str(blank);
    }

    /// Moves to a channel, at a marker of reasoning.
    pub fn switch(&mut self, channel: Channel) {
        self.channel = channel;
        self.edge(Before::Block);
    }

    /// Begins a block of calls: white space in it is the format's.
    pub fn enter_block(&mut self) {
        self.edge(Before::Call);
    }

    fn edge(&mut self, before: Before) {
        self.blank.clear();
        self.before = before;
    }

    /// Begins a call, with the model's own id if it has the family's form.
    pub fn begin_call(&mut self, name: String, id: Option<String>) {
        self.edge(Before::Call);
        let index = self.begun;
        let id = id.unwrap_or_else(|| self.ids.id(index, &name));
        self.emit(Event::CallBegin { index, id, name });
        self.begun += 1;
        self.in_call = true;
    }

    /// The next part of the arguments of the call that began last.
    pub fn arguments(&mut self, fragment: &str) {
        let index = self.begun.saturating_sub(1);
        self.emit(Event::Arguments { index, json_fragment: fragment.to_owned() });
    }

    /// Ends the call that began last.
    pub fn end_call(&mut self) {
        self.emit(Event::CallEnd);
        self.in_call = false;
        self.closed |= self.limit == CallLimit::One;
    }

    /// Delivers white space that is the model's own, at the end of the output.
    pub fn finish(&mut self) {
        let blank = std::mem::take(&mut self.blank);
        match (self.channel, self.before) {
            (Channel::Content, Before::Start) => self.emit(Event::Content(blank)),
            (Channel::Reasoning, Before::Text) => self.emit(Event::Reasoning(blank)),
            _ => {}
        }
    }

    fn emit(&mut self, event: Event) {
        let is_empty = match &event {
            Event::Reasoning(text) | Event::Content(text) => text.is_empty(),
            Event::Arguments { json_fragment, .. } => json_fragment.is_empty(),
            Event::CallBegin { .. } | Event::CallEnd => false,
        };
        if is_empty || self.closed {
            return;
        }
        let rest = match self.events.last_mut() {
            Some(last) => last.merge(event),
            None => Some(event),
        };
        self.events.extend(rest);
    }

    /// Takes the events since the last call.
    pub fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }
}
