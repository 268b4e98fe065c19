//! Typed events of an output, and the answer that they add up to.

/// A part of an output, in the order in which the model writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Text of the reasoning.
    Reasoning(String),
    /// Text of the answer.
    Content(String),
    /// Start of a call. The name is whole.
    CallBegin {
        /// Number of the call in this output, from 0.
        index: usize,
        /// Id of the call, as in OpenAI's `tool_calls[].id`.
        id: String,
        /// Name of the tool, declared or not.
        name: String,
    },
    /// The next part of a call's arguments. The parts of a call concatenate to JSON, if the model writes JSON.
    Arguments {
        /// Number of the call.
        index: usize,
        /// The part.
        json_fragment: String,
    },
    /// End of the call that began last. A call that the end of the output cuts has none.
    CallEnd,
}

impl Event {
    /// Appends `next` to this event if both are text of the same kind. Returns it otherwise.
    pub fn merge(&mut self, next: Event) -> Option<Event> {
        match (self, next) {
            (Event::Reasoning(text), Event::Reasoning(more))
            | (Event::Content(text), Event::Content(more))
            | (Event::Arguments { json_fragment: text, .. }, Event::Arguments { json_fragment: more, .. }) => {
                text.push_str(&more);
                None
            }
            (_, next) => Some(next),
        }
    }
}

/// The whole of an output: the sum of its events. A streamed and a whole answer therefore have one source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// All text of the reasoning.
    pub reasoning: String,
    /// All text of the answer.
    pub content: String,
    /// The calls, by their index.
    pub calls: Vec<Call>,
}

/// A tool call of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its id.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// Its arguments, as the model wrote them.
    pub arguments: String,
    /// False if the output ended inside the call.
    pub ended: bool,
}

impl Event {
    /// Number of bytes of the event's texts.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Reasoning(text) | Self::Content(text) | Self::Arguments { json_fragment: text, .. } => text.len(),
            Self::CallBegin { id, name, .. } => id.len() + name.len(),
            Self::CallEnd => 0,
        }
    }
}

impl Answer {
    /// Adds the next event.
    pub fn add(&mut self, event: Event) {
        match event {
            Event::Reasoning(text) => self.reasoning.push_str(&text),
            Event::Content(text) => self.content.push_str(&text),
            Event::CallBegin { id, name, .. } => {
                self.calls.push(Call { id, name, arguments: String::new(), ended: false });
            }
            Event::Arguments { json_fragment, .. } => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(&json_fragment);
                }
            }
            Event::CallEnd => {
                if let Some(call) = self.calls.last_mut() {
                    call.ended = true;
                }
            }
        }
    }
}

impl Extend<Event> for Answer {
    fn extend<T: IntoIterator<Item = Event>>(&mut self, events: T) {
        events.into_iter().for_each(|event| self.add(event));
    }
}
