//! How the served model writes tool calls and reasoning.

use tutti_formats::{Dialect, Format, Parser, Reasoning, Refusal, Request, Vocabulary};
use tutti_runtime::Error;
use tutti_settings::RouterSettings;

use super::{template::ChatTemplate, tokenizer::Tokenizer};

/// The settings `tool_parser` and `reasoning_parser`.
#[derive(Clone, Debug)]
pub struct ParserNames {
    tool: String,
    reasoning: String,
}

impl Default for ParserNames {
    fn default() -> Self {
        Self::of(&RouterSettings::default())
    }
}

impl ParserNames {
    /// The names in the router's settings.
    pub fn of(settings: &RouterSettings) -> Self {
        Self { tool: settings.tool_parser.clone(), reasoning: settings.reasoning_parser.clone() }
    }

    /// Refuses names that no format and no kind of reasoning has.
    pub fn check(&self) -> Result<(), Error> {
        if let Err(refusal @ Refusal::UnknownFormat(_)) = Format::choose(&self.tool, None) {
            return Err(Error::invalid("tool_parser", refusal.to_string()));
        }
        let kind = Reasoning::choose(&self.reasoning, None);
        kind.map(|_| ()).map_err(|refusal| Error::invalid("reasoning_parser", refusal.to_string()))
    }
}

/// The forms of calls and reasoning of a checkpoint.
#[derive(Debug, Default)]
pub struct ModelDialect {
    dialect: Dialect,
    /// The reason why there is no format of calls.
    refusal: Option<Refusal>,
}

impl ModelDialect {
    /// Chooses the forms by the settings, or by the markers in the chat template. Logs the choice.
    pub fn choose(
        names: &ParserNames,
        template: Option<&ChatTemplate>,
        tokenizer: &Tokenizer,
    ) -> Result<Self, Error> {
        names.check()?;
        let sources: Option<String> = template.map(|template| template.sources().collect());
        let chosen = Format::choose(&names.tool, sources.as_deref());
        let (format, refusal) = match chosen {
            Ok(format) => (Some(format), None),
            Err(refusal) => (None, Some(refusal)),
        };
        let reasoning = Reasoning::choose(&names.reasoning, sources.as_deref())
            .map_err(|refusal| Error::invalid("reasoning_parser", refusal.to_string()))?;
        let vocabulary: Vocabulary = tokenizer.added_tokens().collect();
        let chosen = Self { dialect: Dialect { format, reasoning, vocabulary }, refusal };
        tracing::info!(
            tool_parser = chosen.dialect.format.map_or("none", Format::name),
            reasoning_parser = chosen.reasoning_name(),
            "the forms of tool calls and reasoning are chosen"
        );
        Ok(chosen)
    }

    /// The format of calls, or the reason why there is none.
    pub fn format(&self) -> Result<Format, &Refusal> {
        match (self.dialect.format, &self.refusal) {
            (Some(format), _) => Ok(format),
            (None, Some(refusal)) => Err(refusal),
            (None, None) => Err(&Refusal::NoTemplate),
        }
    }

    /// True if the model may reason in front of its answers.
    pub fn reasons(&self) -> bool {
        self.dialect.reasoning.is_some() || self.format_marks_reasoning()
    }

    /// True if the format of calls itself marks reasoning.
    pub fn format_marks_reasoning(&self) -> bool {
        self.dialect.format.is_some_and(Format::marks_reasoning)
    }

    /// The markers of blocks of reasoning, if the model has such blocks.
    pub fn reasoning(&self) -> Option<Reasoning> {
        self.dialect.reasoning
    }

    /// The tokens that may be markers.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.dialect.vocabulary
    }

    /// Creates the parser of an output without tokens.
    pub fn parser(&self, request: Request) -> Parser {
        self.dialect.parser(request)
    }

    fn reasoning_name(&self) -> &'static str {
        match (self.dialect.reasoning, self.dialect.format) {
            (Some(reasoning), _) => reasoning.name,
            (None, Some(format)) if format.marks_reasoning() => format.name(),
            (None, _) => "none",
        }
    }
}

#[cfg(test)]
mod tests;
