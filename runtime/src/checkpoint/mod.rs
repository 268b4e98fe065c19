//! Where a checkpoint's files come from: a directory, a model hub, or the model shipped in this binary.

mod hub;
mod shipped;

use std::{
    fs, io,
    path::{Path, PathBuf},
    str::FromStr,
};

pub use hub::{HubId, HubOptions};

use crate::{Error, ErrorKind, progress::LoadDisplay};

/// What `--model` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// The small model in this binary: no `--model` was given.
    Shipped,
    /// A directory that exists.
    Directory(PathBuf),
    /// A model on a hub.
    Hub(HubId),
}

impl ModelSource {
    /// Tells a directory from a hub id. An existing directory wins, so that `org/name` can be a local copy.
    pub fn parse(model: Option<&str>) -> Result<Self, Error> {
        let Some(model) = model else { return Ok(Self::Shipped) };
        let path = Path::new(model);
        if path.is_dir() {
            return Ok(Self::Directory(path.to_owned()));
        }
        if path.exists() {
            let message =
                format!("{model:?} is a file; a directory or a hub id like \"org/name\" is expected");
            return Err(Error::invalid("model", message));
        }
        if path.is_absolute() || model.starts_with(['.', '~']) {
            return Err(Error::invalid("model", format!("there is no directory {model:?}")));
        }
        HubId::from_str(model).map(Self::Hub).map_err(|reason| {
            let message =
                format!("{model:?} is neither a directory nor a hub id like \"org/name\": {reason}");
            Error::invalid("model", message)
        })
    }
}

/// Which of a checkpoint's files are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// All that serving takes.
    Everything,
    /// All but the weights, for `--load-format dummy`.
    NoWeights,
}

/// A file of a checkpoint that is read outside the loading of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointFile {
    /// The model's shape.
    Config,
    /// Ends of sequence and default sampling.
    GenerationConfig,
    /// The tokenizer itself.
    Tokenizer,
    /// Special tokens and, in older checkpoints, the chat template.
    TokenizerConfig,
    /// The chat template.
    ChatTemplate,
}

impl CheckpointFile {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Config, Self::GenerationConfig, Self::Tokenizer, Self::TokenizerConfig, Self::ChatTemplate];

    /// The name in the directory.
    pub fn name(self) -> &'static str {
        match self {
            Self::Config => "config.json",
            Self::GenerationConfig => "generation_config.json",
            Self::Tokenizer => "tokenizer.json",
            Self::TokenizerConfig => "tokenizer_config.json",
            Self::ChatTemplate => "chat_template.jinja",
        }
    }
}

/// A checkpoint on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// The directory that holds its files.
    pub dir: PathBuf,
    /// What clients may call it: the hub id, or the directory's own name.
    pub name: String,
}

impl Checkpoint {
    /// A checkpoint in a directory, which must hold a `config.json`.
    pub fn open(dir: &Path, name: impl Into<String>) -> Result<Self, Error> {
        let config = dir.join(CheckpointFile::Config.name());
        if !config.is_file() {
            let message = format!("no {} in {}", CheckpointFile::Config.name(), dir.display());
            return Err(Error::invalid("model", message));
        }
        Ok(Self { dir: dir.to_owned(), name: name.into() })
    }

    /// A file's bytes; `None` where the checkpoint has no such file.
    pub fn read(&self, file: CheckpointFile) -> Result<Option<Vec<u8>>, Error> {
        let path = self.dir.join(file.name());
        match fs::read(&path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::invalid("model", format!("cannot read {}: {error}", path.display()))),
        }
    }
}

/// Brings the source's files onto this machine; downloads show on `display`.
///
/// # Errors
/// `InvalidArgument` or `NotFound` where the source cannot be served as it is named, `Unavailable` where the hub cannot
/// be reached; each names the source and what to do.
pub async fn resolve(
    source: &ModelSource,
    wanted: Wanted,
    hub: &HubOptions,
    display: &LoadDisplay,
) -> Result<Checkpoint, Error> {
    match source {
        ModelSource::Directory(dir) => {
            let dir = fs::canonicalize(dir)
                .map_err(|e| Error::invalid("model", format!("cannot open {}: {e}", dir.display())))?;
            let name = dir.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy());
            Checkpoint::open(&dir, name)
        }
        ModelSource::Hub(id) => {
            let dir = hub::download(id, wanted, hub, display).await?;
            Checkpoint::open(&dir, id.to_string())
        }
        ModelSource::Shipped => {
            let dir = tokio::task::spawn_blocking(|| shipped::unpack(&cache_home()))
                .await
                .map_err(|e| Error::internal(format!("unpacking the shipped model: {e}")))??;
            Checkpoint::open(&dir, shipped::NAME)
        }
    }
}

/// Where this user's caches are, as the XDG base directory specification has it; the temporary directory where there
/// is no home.
fn cache_home() -> PathBuf {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute("XDG_CACHE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
}

/// An error about what `--model` names.
fn model_error(kind: ErrorKind, message: String) -> Error {
    Error::new(kind, message).with_field("model")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_wins_over_a_hub_id_and_a_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        assert_eq!(ModelSource::parse(Some(path)), Ok(ModelSource::Directory(dir.path().into())));
        let file = dir.path().join("model.safetensors");
        fs::write(&file, b"").unwrap();
        let error = ModelSource::parse(file.to_str()).unwrap_err();
        assert!(error.message().contains("is a file"), "{error}");
        assert_eq!(ModelSource::parse(None), Ok(ModelSource::Shipped));
    }

    #[test]
    fn what_is_no_directory_must_be_a_hub_id() {
        let id = |text: &str| ModelSource::parse(Some(text));
        assert!(matches!(id("some-org/Some.Model_1"), Ok(ModelSource::Hub(_))));
        assert!(matches!(id("some-model-that-is-no-directory"), Ok(ModelSource::Hub(_))));
        for bad in [
            "/no/such/dir",
            "./nowhere",
            "a/b/c",
            "a/",
            "",
            "a b",
            "a..b",
            "a--b/c",
            ".x",
            "x.git",
            "https://h/x",
        ] {
            let error = id(bad).unwrap_err();
            assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidArgument, Some("model")), "{bad}");
            assert!(error.message().contains(&format!("{bad:?}")), "{error}");
        }
    }

    #[test]
    fn a_directory_without_a_config_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let error = Checkpoint::open(dir.path(), "x").unwrap_err();
        assert!(error.message().contains("no config.json"), "{error}");
    }

    #[test]
    fn a_missing_file_is_none() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), b"{}").unwrap();
        let checkpoint = Checkpoint::open(dir.path(), "x").unwrap();
        assert_eq!(checkpoint.read(CheckpointFile::Config), Ok(Some(b"{}".to_vec())));
        assert_eq!(checkpoint.read(CheckpointFile::Tokenizer), Ok(None));
    }
}
