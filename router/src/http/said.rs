//! The parts of an answer in OpenAI's format: text, reasoning and tool calls, whole or streamed.

use serde::Serialize;
use tutti_formats::{Answer, Call, Event};

/// The role of all answers.
const ROLE: &str = "assistant";

/// The reasoning of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShownReasoning {
    /// Answers have it.
    Included,
    /// Answers leave it out.
    Excluded,
}

/// The whole message, or a piece of it in a stream.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    Message(Message),
    Delta(Piece),
}

/// A whole message.
#[derive(Serialize)]
pub struct Message {
    role: &'static str,
    /// Null beside calls, if the model says nothing else.
    content: Option<String>,
    refusal: Option<()>,
    #[serde(flatten)]
    reasoning: Reasoning,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<WholeCall>,
}

/// A piece of a message.
#[derive(Default, Serialize)]
pub struct Piece {
    /// Set in a choice's first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(flatten)]
    reasoning: Reasoning,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallPiece>,
}

/// Reasoning under the names of two servers. Clients read one or the other.
#[derive(Default, Serialize)]
struct Reasoning {
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
}

impl Reasoning {
    fn of(text: String) -> Self {
        Self { reasoning_content: Some(text.clone()), reasoning: Some(text) }
    }
}

/// A call of a whole message.
#[derive(Serialize)]
struct WholeCall {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: Function,
}

#[derive(Serialize)]
struct Function {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

/// A piece of a call. The first one of a call has its id, its type and its whole name.
#[derive(Serialize)]
struct CallPiece {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: Function,
}

const FUNCTION: &str = "function";

impl From<Call> for WholeCall {
    fn from(call: Call) -> Self {
        let Call { id, name, arguments, .. } = call;
        Self { id, kind: FUNCTION, function: Function { name: Some(name), arguments } }
    }
}

impl Message {
    /// The sum of an answer's parts.
    pub fn of(parts: Vec<Event>, shown: ShownReasoning) -> Self {
        let mut answer = Answer::default();
        answer.extend(parts);
        let Answer { reasoning, content, calls } = answer;
        let is_shown = shown == ShownReasoning::Included && !reasoning.is_empty();
        Self {
            role: ROLE,
            content: (calls.is_empty() || !content.is_empty()).then_some(content),
            refusal: None,
            reasoning: if is_shown { Reasoning::of(reasoning) } else { Reasoning::default() },
            tool_calls: calls.into_iter().map(WholeCall::from).collect(),
        }
    }
}

impl Piece {
    /// The piece in a choice's first chunk.
    pub fn opening() -> Self {
        Self { role: Some(ROLE), content: Some(String::new()), ..Self::default() }
    }

    /// The piece of a part; `None` if clients see nothing of it.
    pub fn of(part: Event, shown: ShownReasoning) -> Option<Self> {
        let call = |call| Self { tool_calls: vec![call], ..Self::default() };
        match part {
            Event::Content(text) => Some(Self { content: Some(text), ..Self::default() }),
            Event::Reasoning(_) if shown == ShownReasoning::Excluded => None,
            Event::Reasoning(text) => Some(Self { reasoning: Reasoning::of(text), ..Self::default() }),
            Event::CallBegin { index, id, name } => {
                let function = Function { name: Some(name), arguments: String::new() };
                Some(call(CallPiece { index, id: Some(id), kind: Some(FUNCTION), function }))
            }
            Event::Arguments { index, json_fragment } => {
                let function = Function { name: None, arguments: json_fragment };
                Some(call(CallPiece { index, id: None, kind: None, function }))
            }
            Event::CallEnd => None,
        }
    }
}
