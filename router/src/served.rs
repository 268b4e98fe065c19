//! The served model: the conductor's description of it, and the tokenizer, chat template and defaults from the
//! checkpoint's text files.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tutti_formats::Format;
use tutti_proto::{
    cluster::v1::{CheckpointFile, MediaKind, ModelDescription},
    declaration::MediaInput,
    parameters::{NUMBERS, TOP_K},
    v1::Sampling,
};
use tutti_runtime::{Error, ErrorKind, checkpoint::Checkpoint};
use tutti_settings::RouterSettings;

use crate::{
    fleet::Member,
    text::{
        dialect::{ModelDialect, ParserNames},
        template::{ChatTemplate, files::TokenizerFiles},
        tokenizer::Tokenizer,
    },
};

/// The served model: its description and its parsed text files.
pub struct ServedModel {
    /// The conductor's description.
    pub description: ModelDescription,
    /// Tokenizer, chat template and sampling defaults.
    pub text: Arc<ServedText>,
}

/// The parsed text files of a checkpoint.
pub struct ServedText {
    /// `None` with `skip_tokenizer_init`.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// `None` if the checkpoint has no template, or with `skip_tokenizer_init`. An error if the template cannot be
    /// used, which refuses chats alone.
    pub template: Option<Result<Arc<ChatTemplate>, Error>>,
    /// Sampling defaults from generation_config.json.
    pub defaults: Sampling,
    /// The forms of tool calls and reasoning.
    pub dialect: ModelDialect,
}

/// The settings by which a checkpoint's text files are read.
#[derive(Clone, Debug, Default)]
pub struct TextSettings {
    /// True if only token ids are served.
    pub skip_tokenizer_init: bool,
    /// The parsers of answers.
    pub parsers: ParserNames,
}

impl TextSettings {
    /// The settings of a router.
    pub fn of(settings: &RouterSettings) -> Self {
        Self { skip_tokenizer_init: settings.skip_tokenizer_init, parsers: ParserNames::of(settings) }
    }

    /// Refuses names of parsers that there are not.
    pub fn check(&self) -> Result<(), Error> {
        self.parsers.check()
    }
}

/// Reads the default sampling parameters from generation_config.json. Transformers load values out of range, so they do
/// not keep the server from starting: a temperature that is too high becomes the highest one, and any other such value
/// is left out. `warn` gets what is said about them, once when the file is read.
fn sampling_defaults(json: &[u8], warn: &mut dyn FnMut(String)) -> Result<Sampling, Error> {
    let config: Map<String, Value> =
        serde_json::from_slice(json).map_err(|e| Error::internal(e.to_string()))?;
    let mut defaults = Sampling { top_k: top_k(&config, warn)?, ..Sampling::default() };
    // With `do_sample: false`, the default is greedy decoding, whatever the temperature.
    let is_greedy = value(&config, "do_sample")? == Some(false);
    for number in NUMBERS.iter().filter(|number| number.in_checkpoint) {
        let Some(value) = value::<f32>(&config, number.bounds.name)? else { continue };
        match number.bounds.check(value) {
            Ok(value) => (number.ask)(&mut defaults, value),
            Err(refused) if number.bounds.name == TEMPERATURE && value > number.bounds.range.high => {
                let highest = number.bounds.range.high;
                (number.ask)(&mut defaults, highest);
                warn(format!("{refused}; the default is {highest}"));
            }
            Err(refused) => warn(format!("{refused}; the default is {}", number.default)),
        }
    }
    if is_greedy {
        defaults.temperature = Some(0.0);
    }
    Ok(defaults)
}

const TEMPERATURE: &str = NUMBERS[0].bounds.name;

/// Reads `top_k`. Numbers below 1 keep all tokens.
fn top_k(config: &Map<String, Value>, warn: &mut dyn FnMut(String)) -> Result<Option<u32>, Error> {
    let Some(given) = value::<f64>(config, TOP_K.name)? else { return Ok(None) };
    match TOP_K.check(given as i64) {
        Ok(top_k) if top_k as f64 == given => Ok(u32::try_from(top_k.max(0)).ok()),
        Ok(_) => {
            warn(format!("{}: is {given}, but must be an integer; the default is 0", TOP_K.name));
            Ok(None)
        }
        Err(refused) => {
            warn(format!("{refused}; the default is 0"));
            Ok(None)
        }
    }
}

fn value<T: DeserializeOwned>(config: &Map<String, Value>, key: &str) -> Result<Option<T>, Error> {
    let value = config.get(key).cloned().unwrap_or_default();
    serde_json::from_value(value).map_err(|e| Error::internal(format!("{key}: {e}")))
}

/// Contents of the checkpoint's text files. A missing file is `None`.
#[derive(Clone, Default, Hash)]
pub struct TextFiles {
    /// `tokenizer.json`.
    pub tokenizer: Option<Vec<u8>>,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<Vec<u8>>,
    /// `special_tokens_map.json`.
    pub special_tokens_map: Option<Vec<u8>>,
    /// `chat_template.jinja`.
    pub chat_template: Option<Vec<u8>>,
    /// `generation_config.json`.
    pub generation_config: Option<Vec<u8>>,
}

/// The parsed text files of a checkpoint, with a digest that identifies the files.
#[derive(Clone)]
pub struct CheckedText {
    /// See [`TextFiles::digest`].
    pub(crate) digest: u64,
    pub(crate) text: Arc<ServedText>,
}

/// Reads a checkpoint's text files before the front door starts. A missing or broken file is therefore an error at
/// startup, and the files are already parsed when the first worker becomes ready. A missing tokenizer is an error
/// unless `skip_tokenizer_init` is set.
pub fn check_checkpoint(checkpoint: &Checkpoint, settings: &RouterSettings) -> Result<CheckedText, Error> {
    let settings = TextSettings::of(settings);
    CheckedText::read(&TextFiles::of(checkpoint, &settings)?, &settings)
}

impl CheckedText {
    /// Parses the files. Slow: call it on a thread that may block.
    pub(crate) fn read(files: &TextFiles, settings: &TextSettings) -> Result<Self, Error> {
        let text = Arc::new(ServedText::read(files, settings)?);
        Ok(Self { digest: files.digest(), text })
    }
}

impl TextFiles {
    /// Reads the text files of a checkpoint on this machine; with `skip_tokenizer_init`, generation_config.json only,
    /// since a GGUF file may have a tokenizer that is not supported, or none.
    fn of(checkpoint: &Checkpoint, settings: &TextSettings) -> Result<Self, Error> {
        use tutti_runtime::checkpoint::CheckpointFile as Local;
        let mut files =
            Self { generation_config: checkpoint.read(Local::GenerationConfig)?, ..Self::default() };
        if !settings.skip_tokenizer_init {
            files.tokenizer = checkpoint.read(Local::Tokenizer)?;
            files.tokenizer_config = checkpoint.read(Local::TokenizerConfig)?;
            files.special_tokens_map = checkpoint.read(Local::SpecialTokensMap)?;
            files.chat_template = checkpoint.read(Local::ChatTemplate)?;
        }
        Ok(files)
    }

    /// A hash of the contents. Two conductors have the same text files if their digests are equal.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }

    /// Fetches the text files from a conductor; with `skip_tokenizer_init`, generation_config.json only.
    pub async fn fetch(conductor: &Member, settings: &TextSettings) -> Result<Self, Error> {
        let mut files = Self {
            generation_config: fetch(conductor, CheckpointFile::GenerationConfig).await?,
            ..Self::default()
        };
        if !settings.skip_tokenizer_init {
            files.tokenizer = fetch(conductor, CheckpointFile::Tokenizer).await?;
            files.tokenizer_config = fetch(conductor, CheckpointFile::TokenizerConfig).await?;
            files.special_tokens_map = fetch(conductor, CheckpointFile::SpecialTokensMap).await?;
            files.chat_template = fetch(conductor, CheckpointFile::ChatTemplate).await?;
        }
        Ok(files)
    }
}

/// Fetches a file. Returns `None` if the checkpoint lacks the file.
async fn fetch(conductor: &Member, file: CheckpointFile) -> Result<Option<Vec<u8>>, Error> {
    match conductor.read_file(file).await {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        // A conductor of an earlier version does not know the file.
        Err(error)
            if error.kind() == ErrorKind::InvalidArgument && file == CheckpointFile::SpecialTokensMap =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

impl ServedText {
    /// Parses the tokenizer, the chat template and the sampling defaults.
    pub fn read(files: &TextFiles, settings: &TextSettings) -> Result<Self, Error> {
        let defaults = match &files.generation_config {
            Some(bytes) => {
                sampling_defaults(bytes, &mut |problem| tracing::warn!("generation_config.json: {problem}"))
                    .map_err(|e| Error::invalid("generation_config", format!("generation_config.json: {e}")))?
            }
            None => Sampling::default(),
        };
        if settings.skip_tokenizer_init {
            return Ok(Self { tokenizer: None, template: None, defaults, dialect: ModelDialect::default() });
        }
        let Some(json) = &files.tokenizer else {
            let message = "the checkpoint has no tokenizer.json; transformers writes one with \
                           AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), and with skip_tokenizer_init \
                           the model is served by token ids";
            return Err(Error::invalid("tokenizer", message));
        };
        let config =
            TokenizerFiles::read(files.tokenizer_config.as_deref(), files.special_tokens_map.as_deref())?;
        let template = ChatTemplate::of(&config, files.chat_template.as_deref());
        if let Err(error) = &template {
            tracing::warn!(%error, "chats are refused: the checkpoint's chat template cannot be used");
        }
        let tokenizer = Tokenizer::of(json, &config)?;
        let usable = template.as_ref().ok().and_then(Option::as_ref);
        let dialect = ModelDialect::choose(&settings.parsers, usable, &tokenizer)?;
        Ok(Self {
            tokenizer: Some(Arc::new(tokenizer)),
            template: template.transpose().map(|template| template.map(Arc::new)),
            defaults,
            dialect,
        })
    }

    /// The chat template, or an error about the request's messages.
    pub fn template(&self) -> Result<&ChatTemplate, Error> {
        match &self.template {
            Some(Ok(template)) => Ok(template),
            Some(Err(error)) => {
                Err(Error::invalid("messages", format!("cannot be used: {}", error.message())))
            }
            None => {
                let family = Format::without_template(self.dialect.vocabulary());
                let reason = family.unwrap_or("the checkpoint has no chat template");
                Err(Error::invalid("messages", format!("cannot be used: {reason}")))
            }
        }
    }
}

impl ServedModel {
    /// Maximum number of tokens of a request, prompt and output together: the model's context, or less if the workers'
    /// planes hold less.
    pub fn max_model_len(&self) -> u32 {
        self.description.request_limits().tokens.tokens
    }

    /// Returns the tokenizer. If there is none, returns an error about the request's field `field`. The error says that
    /// `kind` (such as "text") needs a tokenizer.
    pub fn tokenizer(&self, field: &str, kind: &str) -> Result<&Arc<Tokenizer>, Error> {
        self.text.tokenizer.as_ref().ok_or_else(|| {
            let message = format!(
                "{kind} needs a tokenizer, and the server runs with skip_tokenizer_init; send token ids"
            );
            Error::invalid(field, message)
        })
    }

    /// The placeholder text for one media item in a prompt. `None` if the model takes no media of this kind, or there
    /// is no tokenizer.
    pub fn placeholder_text(&self, kind: MediaKind) -> Option<String> {
        let input = self.media_inputs().into_iter().find(|input| input.kind == kind)?;
        Some(self.text.tokenizer.as_ref()?.added_text(input.placeholder))
    }

    /// The model's names for clients. Answers have the first.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        [&self.description.served_name].into_iter().chain(&self.description.aliases).map(String::as_str)
    }

    /// A token's string, for logprobs; `token_id:N` without a tokenizer.
    pub fn token_string(&self, id: u32) -> String {
        match &self.text.tokenizer {
            Some(tokenizer) => tokenizer.token_string(id),
            None => format!("token_id:{id}"),
        }
    }

    /// Kinds of media that the model accepts in a prompt.
    pub fn media_inputs(&self) -> Vec<MediaInput> {
        let declared = self.description.declaration.iter().flat_map(|declaration| &declaration.media);
        declared.cloned().map(Into::into).collect()
    }
}

#[cfg(test)]
mod tests;
