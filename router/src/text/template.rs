//! The checkpoint's chat template, rendered by minijinja under the conventions of Hugging Face's `apply_chat_template`.

mod continued;
pub mod files;
mod message;
mod python;
mod shapes;
mod source;
mod switches;

use std::{
    collections::{BTreeMap, HashSet},
    io,
    panic::{AssertUnwindSafe, catch_unwind},
};

use minijinja::{Environment, Value, value::Serde};
use tutti_proto::cluster::v1::MediaKind;
use tutti_runtime::Error;

use self::{
    continued::Marked,
    files::{SPECIAL_TOKEN_NAMES, TokenizerFiles},
    message::{ArgumentShape, Shape},
    shapes::Shapes,
};
pub use self::{
    message::{Content, ContentPart, Message, ToolCall},
    switches::{EFFORT, SWITCHES, Switch, Switches},
};

const NAME: &str = "chat_template";
/// Maximum number of instructions of one rendering. A template runs some tens of instructions per message.
const MAX_INSTRUCTIONS: u64 = if cfg!(fuzzing) { 50_000 } else { 5_000_000 };
/// Maximum size in bytes of the text of a conversation that probes the template.
const MAX_PROBE_BYTES: usize = 64 << 10;

/// Variables of the template that a request's own parameters set.
const ROUTE_NAMES: [&str; 6] =
    ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"];
/// Roles that templates know although they need not name them, such as a template that writes `<|{{ role }}|>`.
const ROLES: [&str; 7] = ["system", "developer", "user", "assistant", "tool", "function", "observation"];
/// Roles whose content templates may read in a shape of its own. All other roles are read as the first.
const PROBED_ROLES: [&str; 3] = ["user", "assistant", "system"];

/// A compiled chat template, and the special tokens that the template may name.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// The template's text.
    source: String,
    special_tokens: BTreeMap<String, String>,
    /// The shapes of content of [`PROBED_ROLES`].
    shapes: Vec<Shapes>,
    /// The shape in which the template reads the arguments of calls.
    arguments: ArgumentShape,
    /// Kinds of media for which the template writes sentinels and placeholders.
    sentinels: Vec<MediaKind>,
    /// Names of the variables that the template reads and does not set.
    variables: HashSet<String>,
    /// The template for requests with tools, if it is another one.
    with_tools: Option<Box<Self>>,
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
    /// The tools, as the client declares them.
    pub tools: Vec<serde_json::Value>,
    /// The request's own wishes about reasoning.
    pub switches: Switches,
}

impl ChatTemplate {
    /// Compiles the template of chat_template.jinja or, if that file is missing, of tokenizer_config.json. Returns
    /// `None` if neither has a template.
    pub fn of(files: &TokenizerFiles, jinja: Option<&[u8]>) -> Result<Option<Self>, Error> {
        let source = match (jinja, &files.template) {
            (Some(bytes), _) => std::str::from_utf8(bytes)
                .map_err(|e| Error::invalid(NAME, format!("chat_template.jinja: {e}")))?
                .to_owned(),
            (None, Some(source)) => source.clone(),
            (None, None) => return Ok(None),
        };
        let mut template = Self::compile(source, files.named.clone())?;
        if jinja.is_none()
            && let Some(source) = &files.tool_template
        {
            template.with_tools = Some(Box::new(Self::compile(source.clone(), files.named.clone())?));
        }
        Ok(Some(template))
    }

    /// The template that renders a request with these tools.
    pub fn for_tools(&self, tools: &[serde_json::Value]) -> &Self {
        match &self.with_tools {
            Some(template) if !tools.is_empty() => template,
            _ => self,
        }
    }

    /// The sources of the template and of the one for tools.
    pub fn sources(&self) -> impl Iterator<Item = &str> {
        let with_tools = self.with_tools.as_ref().map(|template| template.source.as_str());
        [self.source.as_str()].into_iter().chain(with_tools)
    }

    /// Reads tokenizer_config.json and compiles the template.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn read(config: Option<&[u8]>, jinja: Option<&[u8]>) -> Result<Option<Self>, Error> {
        Self::of(&TokenizerFiles::read(config, None)?, jinja)
    }

    fn compile(source: String, special_tokens: BTreeMap<String, String>) -> Result<Self, Error> {
        let mut environment = Environment::new();
        // Hugging Face's transformers sets `trim_blocks` and `lstrip_blocks`, and templates rely on them.
        let syntax = environment.syntax().to_builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_fuel(Some(MAX_INSTRUCTIONS));
        environment.set_syntax(syntax.map_err(|e| Error::internal(format!("jinja's syntax: {e}")))?);
        python::add(&mut environment);
        environment
            .add_template_owned(NAME, source::rewrite(&source))
            .map_err(|e| Error::invalid(NAME, format!("the chat template does not compile: {e}")))?;
        let variables = environment.get_template(NAME).map(|template| template.undeclared_variables(false));
        let mut template = Self {
            environment,
            source,
            special_tokens,
            shapes: Vec::new(),
            arguments: ArgumentShape::Object,
            sentinels: Vec::new(),
            variables: variables.unwrap_or_default(),
            with_tools: None,
        };
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let render = |messages: &[Value]| {
            template.render_values(Value::from(messages.to_vec()), &options, MAX_PROBE_BYTES).ok()
        };
        let shapes = PROBED_ROLES.iter().map(|role| Shapes::find(role, &render)).collect();
        let arguments = ArgumentShape::find(&render);
        let sentinels = shapes::find_sentinels(&render);
        (template.shapes, template.arguments, template.sentinels) = (shapes, arguments, sentinels);
        Ok(template)
    }

    /// The texts that the template may write by itself.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        [self.source.as_str()].into_iter().chain(self.special_tokens.values().map(String::as_str))
    }

    /// True if the role is a word of the template's own: an ordinary role, or a text that the template names. Such a
    /// role may be a part of a control token that the template writes.
    pub fn knows_role(&self, role: &str) -> bool {
        ROLES.contains(&role) || self.names(role)
    }

    /// True if the template names a word.
    fn names(&self, word: &str) -> bool {
        let is_word =
            !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
        is_word && ['\'', '"'].iter().any(|quote| self.source.contains(&format!("{quote}{word}{quote}")))
    }

    /// The role under which the template knows a role. A developer is a system's newer name, which few templates know.
    pub fn role<'r>(&self, role: &'r str) -> &'r str {
        if role == "developer" && !self.names(role) { "system" } else { role }
    }

    /// Refuses variables with the name of a special token, because the checkpoint's tokens hold for the template, and
    /// variables that the request's own parameters set.
    pub fn check_variables(&self, options: &RenderOptions) -> Result<(), Error> {
        let problem = |name: &str| {
            if ROUTE_NAMES.contains(&name) {
                return Some("is set by the request's own parameters");
            }
            let is_special = SPECIAL_TOKEN_NAMES.contains(&name) || self.special_tokens.contains_key(name);
            is_special
                .then_some("is the name of a special token of the checkpoint, which a request cannot replace")
        };
        match options.variables.keys().find_map(|name| Some((name, problem(name)?))) {
            Some((name, message)) => Err(Error::invalid(format!("chat_template_kwargs.{name}"), message)),
            None => Ok(()),
        }
    }

    /// Refuses messages whose text the template would lose.
    pub fn check_messages(&self, messages: &[Message]) -> Result<(), Error> {
        let lost = |message: &&Message| {
            self.shape(message).is_none() && message.content.texts().any(|text| !text.is_empty())
        };
        match messages.iter().find(lost) {
            Some(message) => {
                let role = &message.role;
                let problem =
                    format!("cannot have the role {role:?}: the chat template shows none of their text");
                Err(Error::invalid("messages", problem))
            }
            None => Ok(()),
        }
    }

    /// The shape in which the template reads a message's content. `None` if the template shows nothing of it.
    fn shape(&self, message: &Message) -> Option<Shape> {
        let role = PROBED_ROLES.iter().position(|role| *role == message.role).unwrap_or(0);
        self.shapes.get(role)?.of(&message.content)
    }

    /// Renders a conversation into the text of a prompt of at most `max_bytes` bytes. A failure of the template, or of
    /// the engine that renders it, is an error of the field `messages`.
    pub fn render(
        &self,
        messages: &[Message],
        options: &RenderOptions,
        max_bytes: usize,
    ) -> Result<String, Error> {
        let mut marked = None;
        let mut messages = std::borrow::Cow::Borrowed(messages);
        if options.continue_final_message {
            marked = Some(Marked::mark(messages.to_mut())?);
        }
        let shaped = |message: &Message| {
            let shape = self.shape(message).unwrap_or(Shape::Text);
            message.shaped(shape, self.arguments, &self.sentinels)
        };
        let mut text = self.render_values(messages.iter().map(shaped).collect(), options, max_bytes)?;
        if let Some(marked) = marked {
            marked.cut(&mut text)?;
        }
        Ok(text)
    }

    /// Renders messages in the shape that the template reads.
    fn render_values(
        &self,
        messages: Value,
        options: &RenderOptions,
        max_bytes: usize,
    ) -> Result<String, Error> {
        let refused =
            |e: minijinja::Error| Error::invalid("messages", format!("the chat template refuses them: {e}"));
        let tools = match options.tools.is_empty() {
            true => Value::from(()),
            false => Value::from(Serde(&options.tools)),
        };
        let own = minijinja::context! {
            messages => messages,
            add_generation_prompt => options.add_generation_prompt,
            tools => tools,
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
        String::from_utf8(output.bytes)
            .map_err(|e| Error::internal(format!("the chat template's text is not UTF-8: {e}")))
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

#[cfg(test)]
mod tests;
