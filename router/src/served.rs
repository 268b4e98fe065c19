//! What is served: the conductor's description of the model, and what the checkpoint's text files make of it.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use serde::Deserialize;
use tutti_proto::{
    cluster::v1::{CheckpointFile, MediaKind, ModelDescription},
    declaration::MediaInput,
};
use tutti_runtime::{Error, ErrorKind, checkpoint::Checkpoint};

use crate::{
    fleet::Member,
    generation::{Sampling, validate},
    text::{template::ChatTemplate, tokenizer::Tokenizer},
};

/// A model as the front door knows it.
pub struct ServedModel {
    /// As the conductor describes it.
    pub description: ModelDescription,
    /// How text is made of its tokens.
    pub text: Arc<ServedText>,
}

/// What the checkpoint's text files give.
pub struct ServedText {
    /// None under `skip_tokenizer_init`.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// None where the checkpoint has none, or under `skip_tokenizer_init`.
    pub template: Option<Arc<ChatTemplate>>,
    /// Sampling defaults of generation_config.json.
    pub defaults: SamplingDefaults,
}

/// The sampling fields of generation_config.json: they stand in for what a request does not say.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct SamplingDefaults {
    /// False means greedy, whatever the temperature.
    pub do_sample: Option<bool>,
    /// As in a request.
    pub temperature: Option<f32>,
    /// As in a request.
    pub top_p: Option<f32>,
    /// As in a request.
    pub top_k: Option<u32>,
    /// As in a request.
    pub min_p: Option<f32>,
    /// As in a request.
    pub repetition_penalty: Option<f32>,
}

impl SamplingDefaults {
    /// Reads generation_config.json; values that no request may have are refused here, not with every request.
    fn read(json: &[u8]) -> Result<Self, Error> {
        let defaults = serde_json::from_slice(json).map_err(|e| Error::internal(e.to_string()))?;
        validate::sampling(&Sampling::default(), &defaults, 0)?;
        Ok(defaults)
    }
}

/// The bytes of the checkpoint's text files, each where it exists.
#[derive(Clone, Default, Hash)]
pub struct TextFiles {
    /// `tokenizer.json`.
    pub tokenizer: Option<Vec<u8>>,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<Vec<u8>>,
    /// `chat_template.jinja`.
    pub chat_template: Option<Vec<u8>>,
    /// `generation_config.json`.
    pub generation_config: Option<Vec<u8>>,
}

/// What the text files of a checkpoint on this machine give, and which files those were.
#[derive(Clone)]
pub struct CheckedText {
    /// See [`TextFiles::digest`].
    pub(crate) digest: u64,
    pub(crate) text: Arc<ServedText>,
}

/// Reads a checkpoint's text files for the front door, so that a missing or broken one is an error at once, and what was
/// read can be served as soon as a worker is ready. A missing tokenizer is an error unless `skip_tokenizer_init`.
pub fn check_checkpoint(checkpoint: &Checkpoint, skip_tokenizer_init: bool) -> Result<CheckedText, Error> {
    CheckedText::read(&TextFiles::of(checkpoint)?, skip_tokenizer_init)
}

impl CheckedText {
    /// Takes a moment: for threads that may block.
    pub(crate) fn read(files: &TextFiles, skip_tokenizer_init: bool) -> Result<Self, Error> {
        let text = Arc::new(ServedText::read(files, skip_tokenizer_init)?);
        Ok(Self { digest: files.digest(), text })
    }
}

impl TextFiles {
    /// Reads those that a checkpoint on this machine has.
    fn of(checkpoint: &Checkpoint) -> Result<Self, Error> {
        use tutti_runtime::checkpoint::CheckpointFile as Local;
        Ok(Self {
            tokenizer: checkpoint.read(Local::Tokenizer)?,
            tokenizer_config: checkpoint.read(Local::TokenizerConfig)?,
            chat_template: checkpoint.read(Local::ChatTemplate)?,
            generation_config: checkpoint.read(Local::GenerationConfig)?,
        })
    }

    /// The same for the same files, by which conductors are compared.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }

    /// Fetches those that are needed from a conductor.
    pub async fn fetch(conductor: &Member, skip_tokenizer_init: bool) -> Result<Self, Error> {
        let mut files = Self {
            generation_config: fetch(conductor, CheckpointFile::GenerationConfig).await?,
            ..Self::default()
        };
        if !skip_tokenizer_init {
            files.tokenizer = fetch(conductor, CheckpointFile::Tokenizer).await?;
            files.tokenizer_config = fetch(conductor, CheckpointFile::TokenizerConfig).await?;
            files.chat_template = fetch(conductor, CheckpointFile::ChatTemplate).await?;
        }
        Ok(files)
    }
}

/// The file, or none if the checkpoint lacks it.
async fn fetch(conductor: &Member, file: CheckpointFile) -> Result<Option<Vec<u8>>, Error> {
    match conductor.read_file(file).await {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

impl ServedText {
    /// Builds tokenizer, template and defaults out of the files.
    pub fn read(files: &TextFiles, skip_tokenizer_init: bool) -> Result<Self, Error> {
        let defaults = match &files.generation_config {
            Some(bytes) => SamplingDefaults::read(bytes)
                .map_err(|e| Error::invalid("generation_config", format!("generation_config.json: {e}")))?,
            None => SamplingDefaults::default(),
        };
        if skip_tokenizer_init {
            return Ok(Self { tokenizer: None, template: None, defaults });
        }
        let Some(json) = &files.tokenizer else {
            let message =
                "the checkpoint has no tokenizer.json; with skip_tokenizer_init it is served by token ids";
            return Err(Error::invalid("tokenizer", message));
        };
        let template = ChatTemplate::read(files.tokenizer_config.as_deref(), files.chat_template.as_deref())?;
        Ok(Self {
            tokenizer: Some(Arc::new(Tokenizer::from_bytes(json)?)),
            template: template.map(Arc::new),
            defaults,
        })
    }
}

impl ServedModel {
    /// The tokenizer, or why this kind of input cannot be taken without one.
    pub fn tokenizer(&self, field: &str, kind: &str) -> Result<&Arc<Tokenizer>, Error> {
        self.text.tokenizer.as_ref().ok_or_else(|| {
            let message = format!(
                "{kind} needs a tokenizer, and the server runs with skip_tokenizer_init; send token ids"
            );
            Error::invalid(field, message)
        })
    }

    /// The text that stands in a prompt in the place of media of this kind; none where the model takes no such media, or has
    /// no text.
    pub fn placeholder_text(&self, kind: MediaKind) -> Option<String> {
        let input = self.media_inputs().into_iter().find(|input| input.kind == kind)?;
        Some(self.text.tokenizer.as_ref()?.token_string(input.placeholder))
    }

    /// One token as logprobs show it; without a tokenizer, by its id.
    pub fn token_string(&self, id: u32) -> String {
        match &self.text.tokenizer {
            Some(tokenizer) => tokenizer.token_string(id),
            None => format!("token_id:{id}"),
        }
    }

    /// What a prompt may hold beside text.
    pub fn media_inputs(&self) -> Vec<MediaInput> {
        let declared = self.description.declaration.iter().flat_map(|declaration| &declaration.media);
        declared.cloned().map(Into::into).collect()
    }

    /// The most tokens, prompt and output together, that one request may have, and what sets that limit.
    pub fn token_limit(&self) -> (u32, &'static str) {
        let context = self.description.max_context_tokens;
        match self.description.max_request_tokens {
            pool if pool < context => (pool, "what a worker's KV pool can hold"),
            _ => (context, "the model's context"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support;

    fn files(tokenizer: Option<Vec<u8>>, generation_config: &[u8]) -> TextFiles {
        TextFiles { tokenizer, generation_config: Some(generation_config.to_vec()), ..TextFiles::default() }
    }

    fn refused(files: &TextFiles, skip_tokenizer_init: bool) -> String {
        let error = ServedText::read(files, skip_tokenizer_init).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        error.field().unwrap().to_owned()
    }

    #[test]
    fn a_missing_tokenizer_is_an_error_unless_text_is_off() {
        let bare = files(None, b"{}");
        assert_eq!(refused(&bare, false), "tokenizer");
        assert!(ServedText::read(&bare, true).is_ok());
    }

    #[test]
    fn broken_files_are_named() {
        let good = test_support::tokenizer_json();
        assert_eq!(refused(&files(Some(b"{}".to_vec()), b"{}"), false), "tokenizer");
        assert_eq!(refused(&files(Some(good.clone()), b"["), false), "generation_config");
        assert_eq!(refused(&files(Some(good.clone()), br#"{"top_p": 7}"#), false), "generation_config");
        let broken = |config: Option<&[u8]>, template: Option<&[u8]>| TextFiles {
            tokenizer_config: config.map(<[u8]>::to_vec),
            chat_template: template.map(<[u8]>::to_vec),
            ..files(Some(good.clone()), b"{}")
        };
        assert_eq!(refused(&broken(Some(b"{"), None), false), "tokenizer_config");
        assert_eq!(refused(&broken(None, Some(b"{% if %}")), false), "chat_template");
    }

    #[test]
    fn sampling_defaults_are_read_beside_the_file_s_other_fields() {
        let json = br#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2]}"#;
        let text = ServedText::read(&files(None, json), true).unwrap();
        assert_eq!((text.defaults.temperature, text.defaults.top_k), (Some(0.6), Some(20)));
    }
}
