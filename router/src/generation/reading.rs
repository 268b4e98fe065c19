//! The reading of a chat's answer: its reasoning, its content and its tool calls.

use std::sync::Arc;

use serde_json::{Map, Value};
use tutti_constraints::Strictness;
use tutti_formats::{Block, CallLimit, Calls, Format, Parser, ToolGrammar, Tools, Wanted};
use tutti_proto::{
    cluster::v1::Thinking,
    v1::{Constraint, constraint},
};
use tutti_runtime::Error;

use super::request::GenerationRequest;
use crate::{constraints::CONSTRAINT, served::ServedModel, text::dialect::ModelDialect};

/// A declared tool.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments. `None` if it has no arguments.
    pub parameters: Option<Arc<Map<String, Value>>>,
    /// True if the arguments of every call follow the schema.
    pub is_strict: bool,
}

/// The calls that a request wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// None: what looks like a call is text.
    None,
    /// Any number, by the model's choice.
    #[default]
    Auto,
    /// At least one.
    Required,
    /// Calls of the tool with this index, at least one.
    Named(usize),
}

/// The tools of a chat, and what its answer may hold.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    /// The declared tools.
    pub tools: Vec<Tool>,
    /// Size of their JSON in bytes.
    pub tool_bytes: usize,
    /// The calls that the request wants.
    pub choice: ToolChoice,
    /// Number of calls that an answer may have.
    pub limit: CallLimit,
    /// Number of calls in earlier messages.
    pub earlier_calls: usize,
    /// Maximum number of tokens inside a block of reasoning.
    pub max_thinking_tokens: Option<u32>,
}

/// Refuses what the model cannot do, and constrains the answer to the calls that the request wants. CPU-bound, as long
/// as the schemas of the tools.
pub fn constrain(request: &mut GenerationRequest, model: &ServedModel) -> Result<(), Error> {
    let Some(reading) = &request.reading else { return Ok(()) };
    let Some(calls) = reading.constraint(model)? else { return Ok(()) };
    if request.constraint.is_some() {
        let message = "cannot be required, named or strict where the answer follows a format of its own \
                       (response_format, structured_outputs)";
        return Err(Error::invalid("tools", message));
    }
    request.constraint = Some(calls);
    Ok(())
}

/// Name of the parameter of [`Reading::max_thinking_tokens`].
const BUDGET: &str = "thinking_token_budget";

impl Reading {
    /// Refuses what the model cannot do. Returns the constraint that the wanted calls are.
    fn constraint(&self, model: &ServedModel) -> Result<Option<Constraint>, Error> {
        let dialect = &model.text.dialect;
        if self.max_thinking_tokens.is_some() {
            let tokens = thinking_tokens(dialect).map_err(|reason| Error::invalid(BUDGET, reason))?;
            tokens.ok_or_else(|| {
                Error::invalid(BUDGET, "is not supported: the chat template has no markers of reasoning")
            })?;
        }
        if self.tools.is_empty() {
            return Ok(None);
        }
        // A server without a tokenizer refuses chats as such.
        model.tokenizer("messages", "chat")?;
        let format = dialect.format().map_err(|refusal| {
            Error::invalid("tools", format!("are not supported: {refusal} (setting tool_parser)"))
        })?;
        let Some(wanted) = self.wanted() else { return Ok(None) };
        let Some(grammar) = self.grammar(format, dialect, wanted)? else { return Ok(None) };
        Ok(Some(Constraint { kind: Some(constraint::Kind::Lark(grammar)), ..Constraint::default() }))
    }

    /// The calls that have to follow a grammar.
    fn wanted(&self) -> Option<Wanted> {
        match self.choice {
            ToolChoice::Required | ToolChoice::Named(_) => Some(Wanted::Calls),
            ToolChoice::Auto if self.tools.iter().any(|tool| tool.is_strict) => Some(Wanted::TextAndCalls),
            ToolChoice::Auto | ToolChoice::None => None,
        }
    }

    fn grammar(
        &self,
        format: Format,
        dialect: &ModelDialect,
        wanted: Wanted,
    ) -> Result<Option<String>, Error> {
        let tools = self.tools.iter().enumerate().filter(|(index, _)| match self.choice {
            ToolChoice::Named(named) => *index == named,
            _ => true,
        });
        let is_enforced = |tool: &Tool| wanted == Wanted::Calls || tool.is_strict;
        let tools: Vec<_> = tools
            .map(|(index, tool)| {
                let schema = tool.parameters.as_ref().filter(|_| is_enforced(tool));
                if let Some(schema) = schema {
                    check_schema(&format!("tools[{index}].function.parameters"), schema, format)?;
                }
                Ok(match (schema, tool.parameters.is_some()) {
                    (Some(schema), _) => ToolGrammar::with_schema(&tool.name, schema),
                    (None, true) => ToolGrammar::with_any_arguments(&tool.name),
                    (None, false) => ToolGrammar::without_arguments(&tool.name),
                })
            })
            .collect::<Result<_, Error>>()?;
        let grammar = format.grammar(&tools, wanted, self.limit, dialect.vocabulary());
        grammar.map_err(|error| Error::invalid("tools", error.to_string()))
    }

    /// Creates the parser of one choice. `None` if all of its output is content.
    pub fn parser(&self, model: &ServedModel, tools: Arc<Tools>, block: Block) -> Option<Parser> {
        let dialect = &model.text.dialect;
        let calls = self.calls(dialect);
        if calls == Calls::Text && !dialect.reasons() {
            return None;
        }
        Some(dialect.parser(tutti_formats::Request {
            tools,
            calls,
            calls_in_reasoning: Calls::Events,
            limit: self.limit,
            block,
            id_seed: fastrand::u64(..),
            earlier_calls: self.earlier_calls,
        }))
    }

    /// Whether calls are events. Behind a conversation with calls they are, although no tools are declared: a model
    /// goes on to call tools that it has seen, and their markers are not the answer's text.
    fn calls(&self, dialect: &ModelDialect) -> Calls {
        let shows_calls = !self.tools.is_empty() || self.earlier_calls > 0;
        match self.choice {
            ToolChoice::None => Calls::Text,
            _ if shows_calls && dialect.format().is_ok() => Calls::Events,
            _ => Calls::Text,
        }
    }

    /// The types of the tools' parameters.
    pub fn types(&self) -> Arc<Tools> {
        let types =
            self.tools.iter().map(|tool| (tool.name.clone(), tool.parameters.clone().unwrap_or_default()));
        Arc::new(types.collect())
    }

    /// Size in bytes of the JSON that [`constrain`] works on.
    pub fn enforced_bytes(&self) -> usize {
        self.wanted().map_or(0, |_| self.tool_bytes)
    }

    /// The block of reasoning in front of an answer, if something depends on it: a constraint, or a limit.
    pub fn thinking(
        &self,
        model: &ServedModel,
        block: Block,
        is_constrained: bool,
    ) -> Result<Option<Thinking>, Error> {
        if !is_constrained && self.max_thinking_tokens.is_none() {
            return Ok(None);
        }
        if block == Block::Closed {
            return Ok(None);
        }
        let tokens = thinking_tokens(&model.text.dialect);
        // The format of an answer begins behind its reasoning, so its end has to be seen.
        let unseen = |reason| Error::invalid(CONSTRAINT, format!("{reason}; turn reasoning off"));
        let Some((begin, end)) = tokens.map_err(unseen)? else { return Ok(None) };
        let begin = (block == Block::Unopened).then_some(begin);
        Ok(Some(Thinking { begin, end, max_tokens: self.max_thinking_tokens }))
    }
}

/// Refuses a schema of arguments that cannot be enforced, and names of parameters that the format does not carry.
fn check_schema(path: &str, schema: &Arc<Map<String, Value>>, format: Format) -> Result<(), Error> {
    let value = Value::Object((**schema).clone());
    tutti_constraints::check_schema(path, &value, Strictness::Lenient)
        .map_err(|error| Error::invalid(error.path, error.message))?;
    let properties = schema.get("properties").and_then(Value::as_object).into_iter().flatten();
    for (name, _) in properties {
        format.check_parameter_name(name).map_err(|refusal| {
            let message = format!("{refusal}: the model's calls ({}) cannot carry it", format.name());
            Error::invalid(format!("{path}.properties.{name}"), message)
        })?;
    }
    Ok(())
}

/// The tokens that begin and end a block of reasoning. `None` if the model has no such blocks. Text between other
/// markers can be neither limited nor told from an answer that follows a format.
fn thinking_tokens(dialect: &ModelDialect) -> Result<Option<(u32, u32)>, &'static str> {
    let Some(reasoning) = dialect.reasoning() else { return Ok(None) };
    let tokens = reasoning.tokens(dialect.vocabulary());
    tokens
        .map(Some)
        .ok_or("is not supported: the markers of the model's reasoning are no tokens of its tokenizer")
}

#[cfg(test)]
mod tests;
