//! Renders a conversation. The model's placeholders take the places of media, and special tokens in the clients' text
//! are quoted, so that they stay text.

use serde_json::{Map, Value};
use tutti_runtime::Error;
use tutti_settings::ChatSpecialTokens;

use crate::{
    served::ServedModel,
    text::{
        quoting::{QuotedText, Quoter, Quotes},
        special::Fragments,
        template::{ChatTemplate, Content, ContentPart, Message, RenderOptions, ToolCall},
        tokenizer::Tokenizer,
    },
};

/// A conversation to render.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// The turns so far.
    pub messages: Vec<Message>,
    /// Options of rendering.
    pub options: RenderOptions,
    /// The way in which the messages show where media are.
    pub placeholders: Placeholders,
    /// Size in bytes of what is no content of a message: tools, calls and reasoning.
    pub further_bytes: usize,
}

impl Conversation {
    /// Size of the messages and tools in bytes.
    pub fn text_bytes(&self) -> usize {
        let contents = self.messages.iter().flat_map(|message| message.content.texts());
        contents.map(str::len).sum::<usize>() + self.further_bytes
    }

    /// The beginning of an answer that the output continues: the text of the last message.
    pub fn continued(&self) -> Option<String> {
        let last = self.messages.last().filter(|_| self.options.continue_final_message)?;
        Some(last.content.texts().collect())
    }
}

/// How the messages show where media are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placeholders {
    /// By parts, [`ContentPart::Media`]. The text of a placeholder in a message is text.
    #[default]
    Inserted,
    /// By the placeholders' texts, which the client has written into the messages.
    Written,
}

/// Bytes of a stand-in per byte of the text that it stands for, at most.
const QUOTED_BYTES: usize = 4;

/// Renders a conversation into a text of at most `max_bytes` bytes.
pub fn render(
    conversation: Conversation,
    model: &ServedModel,
    special_tokens: ChatSpecialTokens,
    max_bytes: usize,
) -> Result<QuotedText, Error> {
    let tokenizer = model.tokenizer("messages", "chat")?;
    let Conversation { mut messages, mut options, placeholders, .. } = conversation;
    let template = model.text.template()?.for_tools(&options.tools);
    template.check_variables(&options)?;
    template.set_switches(&mut options)?;
    for message in &mut messages {
        let role = template.role(&message.role);
        if role != message.role {
            message.role = role.to_owned();
        }
    }
    template.check_messages(&messages)?;
    let quotes = match special_tokens {
        ChatSpecialTokens::Text => {
            let written = if placeholders == Placeholders::Written { written(model) } else { Vec::new() };
            let quoting = Quoting { tokenizer, template, written };
            quoting.quote(&mut messages, &mut options)?
        }
        ChatSpecialTokens::Tokens => Quotes::default(),
    };
    let messages = messages.into_iter().map(|message| with_placeholders(message, model));
    let messages = messages.collect::<Result<Vec<_>, Error>>()?;
    if quotes.is_empty() {
        return Ok(template.render(&messages, &options, max_bytes)?.into());
    }
    let text = template.render(&messages, &options, max_bytes.saturating_mul(QUOTED_BYTES))?;
    let text = QuotedText { text, quotes };
    let bytes = text.unquoted_bytes();
    if bytes > max_bytes {
        let message = format!("the chat template's text has {bytes} bytes, over the limit of {max_bytes}");
        return Err(Error::invalid("messages", message));
    }
    Ok(text)
}

/// The texts of the model's placeholders.
fn written(model: &ServedModel) -> Vec<String> {
    let inputs = model.media_inputs();
    inputs
        .iter()
        .filter_map(|input| model.placeholder_text(input.kind))
        .filter(|text| !text.is_empty())
        .collect()
}

/// Quotes the texts of a client.
struct Quoting<'a> {
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    /// Texts in messages that are meant as tokens.
    written: Vec<String>,
}

impl Quoting<'_> {
    fn quote(&self, messages: &mut [Message], options: &mut RenderOptions) -> Result<Quotes, Error> {
        let of_messages = messages.iter().flat_map(|message| {
            let own = [&message.name, &message.reasoning, &message.call_id].into_iter().flatten();
            let own = own.chain([&message.role]).map(String::as_str);
            message.content.texts().chain(own).chain(message.calls.iter().flat_map(of_call))
        });
        let of_variables =
            options.variables.iter().flat_map(|(name, value)| texts(value, vec![name.as_str()]));
        let of_tools = options.tools.iter().flat_map(|tool| texts(tool, Vec::new()));
        let texts = of_messages.chain(of_variables).chain(of_tools).chain(self.template.texts());
        let mut quoter = Quoter::new(self.tokenizer, texts);
        let last = messages.len().saturating_sub(1);
        for (index, message) in messages.iter_mut().enumerate() {
            // An assistant's message that is continued is a prefill, in which a client means its special tokens.
            let is_prefill = options.continue_final_message && index == last && message.role == "assistant";
            if !self.template.knows_role(&message.role) {
                quoter.quote(&mut message.role, Fragments::All)?;
            }
            let own = [&mut message.name, &mut message.reasoning, &mut message.call_id];
            own.into_iter().flatten().try_for_each(|text| quoter.quote(text, Fragments::All))?;
            message.calls.iter_mut().try_for_each(|call| quote_call(call, &mut quoter))?;
            if !is_prefill {
                self.quote_content(&mut message.content, &mut quoter)?;
            }
        }
        for value in options.variables.values_mut().chain(&mut options.tools) {
            quote_value(value, &mut quoter)?;
        }
        Ok(quoter.finish())
    }

    /// Quotes a message's content, text by text.
    fn quote_content(&self, content: &mut Content, quoter: &mut Quoter<'_>) -> Result<(), Error> {
        content.texts_mut().try_for_each(|text| {
            let mut quoted = String::with_capacity(text.len());
            self.quote_piece(text, quoter, &mut quoted)?;
            *text = quoted;
            Ok(())
        })
    }

    /// Quotes a text without media, except for written placeholders.
    fn quote_piece(&self, text: &str, quoter: &mut Quoter<'_>, quoted: &mut String) -> Result<(), Error> {
        let mut rest = text;
        loop {
            let next = self.written.iter().filter_map(|text| Some((rest.find(text.as_str())?, text))).min();
            let (before, placeholder) = next.map_or((rest, ""), |(at, text)| (&rest[..at], text.as_str()));
            let mut before = before.to_owned();
            rest = &rest[before.len() + placeholder.len()..];
            quoter.quote(&mut before, Fragments::All)?;
            quoted.push_str(&before);
            quoted.push_str(placeholder);
            if next.is_none() {
                return Ok(());
            }
        }
    }
}

/// All texts in a call of an earlier turn.
fn of_call(call: &ToolCall) -> impl Iterator<Item = &str> {
    let arguments = call.arguments.iter().flat_map(|(name, value)| texts(value, vec![name.as_str()]));
    call.id.as_deref().into_iter().chain([call.name.as_str()]).chain(arguments)
}

fn quote_call(call: &mut ToolCall, quoter: &mut Quoter<'_>) -> Result<(), Error> {
    if let Some(id) = &mut call.id {
        quoter.quote(id, Fragments::All)?;
    }
    quoter.quote(&mut call.name, Fragments::All)?;
    quote_members(&mut call.arguments, quoter)
}

/// Quotes all texts of a template's variable, or of a tool. Words alone are not quoted, because templates compare
/// variables with words, such as an effort that is `high`.
fn quote_value(value: &mut Value, quoter: &mut Quoter<'_>) -> Result<(), Error> {
    match value {
        Value::String(text) => quoter.quote(text, Fragments::WithoutWords),
        Value::Array(values) => values.iter_mut().try_for_each(|value| quote_value(value, quoter)),
        Value::Object(members) => quote_members(members, quoter),
        Value::Null | Value::Bool(_) | Value::Number(_) => Ok(()),
    }
}

fn quote_members(members: &mut Map<String, Value>, quoter: &mut Quoter<'_>) -> Result<(), Error> {
    for (mut name, mut value) in std::mem::take(members) {
        quoter.quote(&mut name, Fragments::WithoutWords)?;
        quote_value(&mut value, quoter)?;
        members.insert(name, value);
    }
    Ok(())
}

/// All texts in a value, behind those in `found`.
fn texts<'a>(value: &'a Value, mut found: Vec<&'a str>) -> Vec<&'a str> {
    match value {
        Value::String(text) => found.push(text),
        Value::Array(values) => return values.iter().fold(found, |found, value| texts(value, found)),
        Value::Object(members) => {
            return members.iter().fold(found, |mut found, (name, value)| {
                found.push(name);
                texts(value, found)
            });
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
    found
}

/// Inserts the model's placeholders into a message, in the places of its media.
fn with_placeholders(mut message: Message, model: &ServedModel) -> Result<Message, Error> {
    let Content::List(parts) = &mut message.content else { return Ok(message) };
    for part in parts {
        let ContentPart::Media { kind, placeholder } = part else { continue };
        let Some(text) = model.placeholder_text(*kind) else {
            let kind = kind.as_str_name().to_lowercase();
            return Err(Error::invalid("messages", format!("hold {kind}, which the model does not take")));
        };
        *placeholder = text;
    }
    Ok(message)
}

#[cfg(test)]
mod tests;
