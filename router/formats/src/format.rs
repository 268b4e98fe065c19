//! The formats of calls, one family each.

mod deepseek;
pub(crate) mod dsml;
mod glm;
mod harmony;
mod hermes;
mod kimi;
mod llama;
mod minimax;
mod mistral;
mod pythonic;
mod qwen;

use std::sync::Arc;

pub(crate) use self::{
    deepseek::DeepSeek, dsml::Dsml, glm::Glm, harmony::Harmony, hermes::Hermes, kimi::Kimi, llama::Llama,
    minimax::MiniMax, mistral::Mistral, pythonic::Pythonic, qwen::Qwen,
};
use crate::{
    cursor::{Break, Cursor, Lexicon},
    grammar::Grammar,
    names::ParameterNames,
    tools::Tools,
};

/// A text that begins a call, or a block of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trigger {
    /// A marker, wherever it stands.
    Marker(&'static str),
    /// A text that begins a call only where no content stands before it.
    Start(&'static str),
}

/// A family's way of writing calls between content and reasoning.
pub(crate) trait CallFormat: Send + Sync {
    /// Markers or texts with which calls begin.
    const TRIGGERS: &'static [Trigger];

    /// The names of parameters that calls carry.
    const PARAMETER_NAMES: ParameterNames = ParameterNames::Any;

    /// Makes the format's markers.
    fn new(lexicon: &mut Lexicon<'_>, tools: Arc<Tools>) -> Self;

    /// Writes the rule `calls` of calls that this reader reads.
    fn grammar(grammar: &mut Grammar<'_>);

    /// Reads a call, or a block of calls, behind the trigger of this position.
    fn read(&self, cursor: &Cursor, trigger: usize) -> impl Future<Output = Result<(), Break>> + Send;
}

/// The format without calls: all is text.
pub(crate) struct NoCalls;

impl CallFormat for NoCalls {
    const TRIGGERS: &'static [Trigger] = &[];

    fn new(_: &mut Lexicon<'_>, _: Arc<Tools>) -> Self {
        Self
    }

    fn grammar(_: &mut Grammar<'_>) {}

    async fn read(&self, _: &Cursor, _: usize) -> Result<(), Break> {
        Err(Break::Malformed)
    }
}
