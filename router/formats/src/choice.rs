//! The choice of a format, by its name or by the markers in a chat template.

use std::{fmt, str::FromStr};

use crate::{
    cursor::Vocabulary,
    format::{
        CallFormat, DeepSeek, Dsml, Glm, Harmony, Hermes, Kimi, Llama, MiniMax, Mistral, NoCalls, Pythonic,
        Qwen, Trigger, dsml,
    },
    grammar::Grammar,
    ids::IdStyle,
    names::ParameterNames,
    parser::{Making, Reading},
    turn::{Calls, Turn},
};

/// A format of tool calls.
#[derive(Clone, Copy)]
pub struct Format(&'static Declaration);

/// A format's entry in the table of formats.
struct Declaration {
    name: &'static str,
    /// Names that vLLM gives to the same format or to parts of it.
    aliases: &'static [&'static str],
    /// Alternatives; each is a list of texts that a chat template of the format has.
    signs: &'static [&'static [&'static str]],
    ids: IdStyle,
    /// True if a part of the format is reasoning.
    marks_reasoning: bool,
    /// Set if models of the format come without a chat template.
    without_template: Option<WithoutTemplate>,
    read: fn(Making<'_, '_>) -> Reading,
    /// Markers that begin calls in text.
    triggers: &'static [Trigger],
    /// The names of parameters that calls carry.
    parameter_names: ParameterNames,
    /// Writes the rules of calls.
    grammar: fn(&mut Grammar<'_>),
}

/// A family whose checkpoints have no chat template.
pub(crate) struct WithoutTemplate {
    /// Part of a token's text by which the family's tokenizer is known.
    pub token_part: &'static str,
    /// The reason, for errors.
    pub reason: &'static str,
}

/// All formats. A template is of the first format whose signs it has: the particular ones stand before the general.
static FORMATS: [Declaration; 11] = [
    Declaration {
        name: "harmony",
        aliases: &["openai", "gpt_oss"],
        signs: &[&["<|channel|>"]],
        ids: IdStyle::OpenAi,
        marks_reasoning: true,
        without_template: None,
        read: read_harmony,
        triggers: &[],
        parameter_names: ParameterNames::Any,
        grammar: Harmony::grammar,
    },
    Declaration {
        name: "dsml",
        aliases: &["deepseek_v32", "deepseek_v4"],
        signs: &[&["｜DSML｜"]],
        ids: IdStyle::OpenAi,
        marks_reasoning: false,
        without_template: Some(dsml::WITHOUT_TEMPLATE),
        read: read_turn::<Dsml>,
        triggers: Dsml::TRIGGERS,
        parameter_names: Dsml::PARAMETER_NAMES,
        grammar: Dsml::grammar,
    },
    Declaration {
        name: "deepseek",
        aliases: &["deepseek_v3", "deepseek_v31"],
        signs: &[&["<｜tool▁sep｜>"]],
        ids: IdStyle::OpenAi,
        marks_reasoning: false,
        without_template: None,
        read: read_turn::<DeepSeek>,
        triggers: DeepSeek::TRIGGERS,
        parameter_names: DeepSeek::PARAMETER_NAMES,
        grammar: DeepSeek::grammar,
    },
    Declaration {
        name: "kimi",
        aliases: &["kimi_k2"],
        signs: &[&["<|tool_call_argument_begin|>"], &["<|tool_call_begin|>", "functions."]],
        ids: IdStyle::Kimi,
        marks_reasoning: false,
        without_template: None,
        read: read_turn::<Kimi>,
        triggers: Kimi::TRIGGERS,
        parameter_names: Kimi::PARAMETER_NAMES,
        grammar: Kimi::grammar,
    },
    Declaration {
        name: "minimax",
        aliases: &["minimax_m2"],
        signs: &[&["<minimax:tool_call>"]],
        ids: IdStyle::OpenAi,
        marks_reasoning: false,
        without_template: None,
        read: read_turn::<MiniMax>,
        triggers: MiniMax::TRIGGERS,
        parameter_names: MiniMax::PARAMETER_NAMES,
        grammar: MiniMax::grammar,
    },
    Declaration {
        name: "glm",
        aliases: &["glm45", "glm47"],
        signs: &[&["<arg_key>"]],
        ids: IdStyle::OpenAi,
        marks_reasoning: false,
        without_template: None,
        read: read_turn::<Glm>,
        triggers: Glm::TRIGGERS,
        parameter_names: Glm::PARAMETER_NAMES,
        grammar: Glm::grammar,
    },
    Declaration {
        name: "qwen_xml",
        aliases: &["qwen3_coder", "qwen3_xml"],
        signs: &[&["<tool_call>", "<function="]],
        ids: IdStyle::OpenAi,
        marks_reasoning: false,
        without_template: None,
        read: read_turn::<Qwen>,
        triggers: Qwen::TRIGGERS,
        parameter_names: Qwen::PARAMETER_NAMES,
        grammar: Qwen::grammar,
    },
    Declaration {
        name: "hermes",
        aliases: &["qwen"],
        signs: &[&["<tool_call>", "arguments"]],
        ids: IdStyle::OpenAi,
        marks_reasoning: false,
        without_template: None,
        read: read_turn::<Hermes>,
        triggers: Hermes::TRIGGERS,
        parameter_names: Hermes::PARAMETER_NAMES,
        grammar: Hermes::grammar,
    },
    Declaration {
        name: "mistral",
        aliases: &[],
        signs: &[&["[TOOL_CALLS]"]],
        ids: IdStyle::Mistral,
        marks_reasoning: false,
        without_template: None,
        read: read_turn::<Mistral>,
        triggers: Mistral::TRIGGERS,
        parameter_names: Mistral::PARAMETER_NAMES,
        grammar: Mistral::grammar,
    },
    Declaration {
        name: "pythonic",
        aliases: &["llama4_pythonic"],
        signs: &[&["<|python_start|>"], &["func_name1("]],
        ids: IdStyle::OpenAi,
        marks_reasoning: false,
        without_template: None,
        read: read_turn::<Pythonic>,
        triggers: Pythonic::TRIGGERS,
        parameter_names: Pythonic::PARAMETER_NAMES,
        grammar: Pythonic::grammar,
    },
    Declaration {
        name: "llama3_json",
        aliases: &["llama4_json"],
        signs: &[&["<|python_tag|>"], &["\"parameters\"", "ipython"]],
        ids: IdStyle::OpenAi,
        marks_reasoning: false,
        without_template: None,
        read: read_turn::<Llama>,
        triggers: Llama::TRIGGERS,
        parameter_names: Llama::PARAMETER_NAMES,
        grammar: Llama::grammar,
    },
];

/// Why a format or a kind of reasoning cannot be chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No format has this name.
    #[error("no format of tool calls is named {0:?}; there are auto, {names}", names = Format::list())]
    UnknownFormat(String),
    /// No kind of reasoning has this name.
    #[error("no kind of reasoning is named {0:?}; there are {names}", names = list(crate::Reasoning::names()))]
    UnknownReasoning(String),
    /// There is no chat template to find markers in.
    #[error(
        "the model has no chat template that shows its format of tool calls; it can be named: {names}",
        names = Format::list()
    )]
    NoTemplate,
    /// The chat template shows no known markers.
    #[error(
        "the chat template has the markers of no known format of tool calls; one can be named: {names}",
        names = Format::list()
    )]
    NoMarkers,
}

impl Format {
    /// The format that a setting names: `auto` is the one whose markers the chat template has.
    pub fn choose(setting: &str, template: Option<&str>) -> Result<Self, Refusal> {
        match (setting, template) {
            ("auto", Some(template)) => Self::of_template(template).ok_or(Refusal::NoMarkers),
            ("auto", None) => Err(Refusal::NoTemplate),
            (name, _) => name.parse(),
        }
    }

    /// The format whose markers a chat template has.
    pub fn of_template(template: &str) -> Option<Self> {
        let has = |signs: &&[&str]| signs.iter().all(|sign| template.contains(sign));
        FORMATS.iter().find(|format| format.signs.iter().any(has)).map(Self)
    }

    /// All formats.
    pub fn all() -> impl Iterator<Item = Self> {
        FORMATS.iter().map(Self)
    }

    /// The format's name, as settings have it.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    pub(crate) fn ids(self) -> IdStyle {
        self.0.ids
    }

    pub(crate) fn parameter_names(self) -> ParameterNames {
        self.0.parameter_names
    }

    /// True if the format itself marks reasoning, so that no kind of [`Reasoning`](crate::Reasoning) is needed.
    pub fn marks_reasoning(self) -> bool {
        self.0.marks_reasoning
    }

    /// The reason why a model whose tokenizer has these tokens has no chat template, if its family ships none.
    pub fn without_template(vocabulary: &Vocabulary) -> Option<&'static str> {
        let mut families = FORMATS.iter().filter_map(|format| format.without_template.as_ref());
        families.find(|family| vocabulary.has_part(family.token_part)).map(|family| family.reason)
    }

    /// Makes the reader of a format, or the one without calls.
    pub(crate) fn read(format: Option<Self>, making: Making<'_, '_>) -> Reading {
        format.map_or(read_turn::<NoCalls> as fn(Making<'_, '_>) -> Reading, |format| format.0.read)(making)
    }

    /// True if a token begins the calls of the grammar, so that they can be told from text.
    pub(crate) fn begins_calls_by_tokens(self, vocabulary: &Vocabulary) -> bool {
        let is_marker = |trigger: &Trigger| matches!(trigger, Trigger::Marker(_));
        let first = self.0.triggers.first().filter(|_| self.0.triggers.iter().all(is_marker));
        matches!(first, Some(Trigger::Marker(text)) if vocabulary.id(text).is_some())
    }

    /// Writes the rules of calls.
    pub(crate) fn write_grammar(self, grammar: &mut Grammar<'_>) {
        (self.0.grammar)(grammar);
    }

    /// The names of all formats, for messages.
    fn list() -> String {
        list(Self::all().map(Self::name))
    }
}

fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

impl FromStr for Format {
    type Err = Refusal;

    fn from_str(name: &str) -> Result<Self, Refusal> {
        let is_named = |format: &&Declaration| format.name == name || format.aliases.contains(&name);
        FORMATS.iter().find(is_named).map(Self).ok_or_else(|| Refusal::UnknownFormat(name.to_owned()))
    }
}

impl PartialEq for Format {
    fn eq(&self, other: &Self) -> bool {
        self.0.name == other.0.name
    }
}

impl Eq for Format {}

impl fmt::Debug for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name)
    }
}

fn read_turn<F: CallFormat + 'static>(making: Making<'_, '_>) -> Reading {
    match making.calls {
        Calls::Events => {
            let format = F::new(making.lexicon, making.tools);
            reading(Turn::new(making.lexicon, format, making.thinking), making.cursor)
        }
        Calls::Text => reading(Turn::new(making.lexicon, NoCalls, making.thinking), making.cursor),
    }
}

fn reading<F: CallFormat + 'static>(turn: Turn<F>, cursor: crate::cursor::Cursor) -> Reading {
    Box::pin(async move { _ = turn.read(&cursor).await })
}

fn read_harmony(making: Making<'_, '_>) -> Reading {
    let harmony = Harmony::new(making.lexicon, making.calls == Calls::Events);
    let cursor = making.cursor;
    Box::pin(async move { _ = harmony.read(&cursor).await })
}

#[cfg(test)]
mod tests;
