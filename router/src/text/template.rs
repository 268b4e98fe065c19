//! The checkpoint's chat template, rendered by minijinja under the conventions of Hugging Face's `apply_chat_template`.

use std::{
    collections::BTreeMap,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
};

use minijinja::{
    Environment, ErrorKind, Value,
    value::{Kwargs, Serde},
};
use serde::{Deserialize, Serialize};
use serde_json::ser::{Formatter, PrettyFormatter};
use tutti_proto::cluster::v1::MediaKind;
use tutti_runtime::Error;

const NAME: &str = "chat_template";
/// Maximum number of instructions of one rendering. A template runs some tens of instructions per message.
const MAX_INSTRUCTIONS: u64 = if cfg!(fuzzing) { 50_000 } else { 5_000_000 };

/// Names under which the library sets special tokens, whether the checkpoint has them or not.
const SPECIAL_TOKEN_NAMES: [&str; 8] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
];
/// Roles that templates know although they need not name them, such as a template that writes `<|{{ role }}|>`.
const ROLES: [&str; 7] = ["system", "developer", "user", "assistant", "tool", "function", "observation"];

/// A compiled chat template, and the special tokens that the template may name.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// The template's text.
    source: String,
    special_tokens: BTreeMap<String, String>,
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, or another role that the template knows.
    pub role: String,
    /// The text.
    pub content: String,
    /// Name of the speaker, for templates that show it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Kinds of the media in the text, with their byte offsets in ascending order. The template sees the model's
    /// placeholder at each offset.
    #[serde(skip)]
    pub media_at: Vec<(MediaKind, usize)>,
}

/// Options of rendering: the end of the prompt, and the template's variables.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RenderOptions {
    /// True if the prompt ends with the start of an assistant's turn.
    pub add_generation_prompt: bool,
    /// True if the prompt ends inside the last message, so that the output continues that message.
    pub continue_final_message: bool,
    /// Further variables of the template (`enable_thinking`, …).
    pub variables: serde_json::Map<String, serde_json::Value>,
}

/// The template and the special tokens in tokenizer_config.json.
#[derive(Deserialize)]
struct TokenizerConfig {
    chat_template: Option<TemplateField>,
    #[serde(flatten)]
    rest: BTreeMap<String, serde_json::Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TemplateField {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl ChatTemplate {
    /// Reads the template from chat_template.jinja or, if that file is missing, from tokenizer_config.json. Returns
    /// `None` if neither has a template.
    pub fn read(config: Option<&[u8]>, jinja: Option<&[u8]>) -> Result<Option<Self>, Error> {
        let config: Option<TokenizerConfig> = config
            .map(serde_json::from_slice)
            .transpose()
            .map_err(|e| Error::invalid("tokenizer_config", format!("tokenizer_config.json: {e}")))?;
        let (field, rest) = config.map_or((None, BTreeMap::new()), |c| (c.chat_template, c.rest));
        let source = match (jinja, field) {
            (Some(bytes), _) => std::str::from_utf8(bytes)
                .map_err(|e| Error::invalid(NAME, format!("chat_template.jinja: {e}")))?
                .to_owned(),
            (None, Some(TemplateField::One(source))) => source,
            (None, Some(TemplateField::Named(named))) => match default_of(named) {
                Some(source) => source,
                None => return Ok(None),
            },
            (None, None) => return Ok(None),
        };
        let special_tokens = rest
            .into_iter()
            .filter(|(key, _)| key.ends_with("_token"))
            .filter_map(|(key, value)| Some((key, token_text(&value)?)))
            .collect();
        Self::compile(source, special_tokens).map(Some)
    }

    fn compile(source: String, special_tokens: BTreeMap<String, String>) -> Result<Self, Error> {
        let mut environment = Environment::new();
        // Hugging Face's transformers sets `trim_blocks` and `lstrip_blocks`, and templates rely on them.
        let syntax = environment.syntax().to_builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_fuel(Some(MAX_INSTRUCTIONS));
        environment.set_syntax(syntax.map_err(|e| Error::internal(format!("jinja's syntax: {e}")))?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        environment
            .add_template_owned(NAME, source.clone())
            .map_err(|e| Error::invalid(NAME, format!("the chat template does not compile: {e}")))?;
        Ok(Self { environment, source, special_tokens })
    }

    /// The texts that the template may write by itself.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        [self.source.as_str()].into_iter().chain(self.special_tokens.values().map(String::as_str))
    }

    /// True if the role is a word of the template's own: an ordinary role, or a text that the template names. Such a
    /// role may be a part of a control token that the template writes.
    pub fn knows_role(&self, role: &str) -> bool {
        let is_word =
            !role.is_empty() && role.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
        let names = |quote: char| self.source.contains(&format!("{quote}{role}{quote}"));
        ROLES.contains(&role) || (is_word && (names('\'') || names('"')))
    }

    /// Refuses variables with the name of a special token: the checkpoint's tokens hold for the template.
    pub fn check_variables(&self, options: &RenderOptions) -> Result<(), Error> {
        let is_special = |name: &String| {
            SPECIAL_TOKEN_NAMES.contains(&name.as_str()) || self.special_tokens.contains_key(name)
        };
        match options.variables.keys().find(|name| is_special(name)) {
            Some(name) => {
                let message =
                    "is the name of a special token of the checkpoint, which a request cannot replace";
                Err(Error::invalid(format!("chat_template_kwargs.{name}"), message))
            }
            None => Ok(()),
        }
    }

    /// Renders a conversation into the text of a prompt of at most `max_bytes` bytes. A failure of the template, or of
    /// the engine that renders it, is an error of the field `messages`.
    pub fn render(
        &self,
        messages: &[Message],
        options: &RenderOptions,
        max_bytes: usize,
    ) -> Result<String, Error> {
        let refused =
            |e: minijinja::Error| Error::invalid("messages", format!("the chat template refuses them: {e}"));
        let own = minijinja::context! {
            messages => Value::from(Serde(messages)),
            add_generation_prompt => options.add_generation_prompt,
            tools => Value::from(()),
            documents => Value::from(()),
        };
        let context = minijinja::context! {
            ..own, ..Value::from(Serde(&options.variables)), ..Value::from(Serde(&self.special_tokens))
        };
        let template = self.environment.get_template(NAME).map_err(refused)?;
        let mut output = BoundedText { bytes: Vec::new(), max_bytes };
        // minijinja 3.0.5 panics for some values, for example for `x[::-1]` of an empty `x`. Values come from clients.
        // A panic leaves no invalid state: the engine keeps no state between renderings, and `output` is dropped.
        let rendered = catch_unwind(AssertUnwindSafe(|| template.render_captured_to(context, &mut output)));
        let engine_failed = |_| Error::invalid("messages", "the chat template's engine fails on them");
        rendered.map_err(engine_failed)?.map_err(refused)?;
        let mut text = String::from_utf8(output.bytes)
            .map_err(|e| Error::internal(format!("the chat template's text is not UTF-8: {e}")))?;
        if options.continue_final_message {
            cut_after_last_message(&mut text, messages)?;
        }
        Ok(text)
    }
}

/// A text that grows up to a limit.
struct BoundedText {
    bytes: Vec<u8>,
    max_bytes: usize,
}

impl io::Write for BoundedText {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + piece.len() > self.max_bytes {
            return Err(io::Error::other(format!("the text is over the limit of {} bytes", self.max_bytes)));
        }
        self.bytes.extend_from_slice(piece);
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Removes the text that the template adds after the last message.
fn cut_after_last_message(text: &mut String, messages: &[Message]) -> Result<(), Error> {
    let last = messages.last().map_or("", |m| m.content.trim());
    let Some(start) = text.rfind(last) else {
        let message = "the chat template does not show the last message as it is, so it cannot be continued";
        return Err(Error::invalid("continue_final_message", message));
    };
    text.truncate(start + last.len());
    Ok(())
}

/// The template named `default`. Checkpoints with several templates (for tools, for retrieval) give this name to the
/// plain template.
fn default_of(named: Vec<NamedTemplate>) -> Option<String> {
    named.into_iter().find(|t| t.name == "default").map(|t| t.template)
}

/// The text of a special token, which is a string or an object with the string in `content`.
fn token_text(value: &serde_json::Value) -> Option<String> {
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
}

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

/// The current time in UTC, in `strftime`'s format.
fn strftime_now(format: &str) -> Result<String, minijinja::Error> {
    let now = jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC);
    jiff::fmt::strtime::format(format, &now)
        .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}")))
}

/// Python's `json.dumps(value, ensure_ascii=False)`. It replaces minijinja's own filter, which escapes for HTML.
fn to_json(value: Value, options: Kwargs) -> Result<Value, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    // `ensure_ascii` is accepted and ignored: the output is never escaped.
    let _: Option<bool> = options.get("ensure_ascii")?;
    let sorted: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let failed = |e: serde_json::Error| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string());
    let mut tree = serde_json::to_value(&value).map_err(failed)?;
    if sorted == Some(true) {
        tree.sort_all_objects();
    }
    let mut text = Vec::new();
    let written = match indent {
        Some(width) => {
            let spaces = " ".repeat(width.min(16));
            let formatter = PrettyFormatter::with_indent(spaces.as_bytes());
            tree.serialize(&mut serde_json::Serializer::with_formatter(&mut text, formatter))
        }
        None => tree.serialize(&mut serde_json::Serializer::with_formatter(&mut text, PythonSeparators)),
    };
    written.map_err(failed)?;
    Ok(Value::from_safe_string(String::from_utf8_lossy(&text).into_owned()))
}

/// Writes `", "` between members and `": "` after keys, as Python does.
struct PythonSeparators;

impl Formatter for PythonSeparators {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

#[cfg(test)]
mod tests;
