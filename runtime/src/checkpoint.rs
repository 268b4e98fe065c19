//! Sources of a checkpoint's files: a directory, a model hub, or the model shipped in this binary.

pub mod contents;
mod gguf;
mod hub;
mod shipped;

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    str::FromStr,
};

pub use gguf::files as gguf_files;
pub use hub::{HubId, HubOptions};

use crate::{Error, ErrorKind, progress::LoadDisplay};

/// The source that `--model` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// The small model in this binary: no `--model` was given.
    Shipped,
    /// A directory that exists.
    Directory(PathBuf),
    /// A GGUF file that exists.
    Gguf(PathBuf),
    /// A model on a hub.
    Hub(HubId),
}

impl ModelSource {
    /// True if the files are on this machine.
    pub fn is_local(&self) -> bool {
        matches!(self, Self::Shipped | Self::Directory(_) | Self::Gguf(_))
    }

    /// Parses a directory, a GGUF file or a hub id. An existing directory takes precedence over a hub id, so that
    /// `org/name` can be a local copy.
    pub fn parse(model: Option<&str>) -> Result<Self, Error> {
        let Some(model) = model else { return Ok(Self::Shipped) };
        let path = Path::new(model);
        if path.is_dir() {
            return Ok(Self::Directory(path.to_owned()));
        }
        if crate::gguf::is_file(path) {
            return Ok(Self::Gguf(path.to_owned()));
        }
        if path.exists() {
            let message = format!(
                "{model:?} is a file; a directory, a GGUF file or a hub id like \"org/name\" is expected"
            );
            return Err(Error::invalid("model", message));
        }
        if path.is_absolute() || model.starts_with(['.', '~']) {
            return Err(Error::invalid("model", format!("there is no directory or GGUF file {model:?}")));
        }
        HubId::from_str(model).map(Self::Hub).map_err(|reason| {
            let message =
                format!("{model:?} is neither a directory nor a hub id like \"org/name\": {reason}");
            Error::invalid("model", message)
        })
    }
}

/// The files of a checkpoint that the process needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// All files that serving needs.
    Everything,
    /// All files but the weights, for `--load-format dummy`.
    NoWeights,
}

/// A text file of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointFile {
    /// The model's shape.
    Config,
    /// End-of-sequence ids and default sampling parameters.
    GenerationConfig,
    /// The tokenizer.
    Tokenizer,
    /// Special tokens and, in older checkpoints, the chat template.
    TokenizerConfig,
    /// Special tokens of older checkpoints.
    SpecialTokensMap,
    /// The chat template.
    ChatTemplate,
}

impl CheckpointFile {
    /// All files.
    pub const ALL: [Self; 6] = [
        Self::Config,
        Self::GenerationConfig,
        Self::Tokenizer,
        Self::TokenizerConfig,
        Self::SpecialTokensMap,
        Self::ChatTemplate,
    ];

    /// The file's name in the checkpoint's directory.
    pub fn name(self) -> &'static str {
        match self {
            Self::Config => "config.json",
            Self::GenerationConfig => "generation_config.json",
            Self::Tokenizer => "tokenizer.json",
            Self::TokenizerConfig => "tokenizer_config.json",
            Self::SpecialTokensMap => "special_tokens_map.json",
            Self::ChatTemplate => "chat_template.jinja",
        }
    }
}

/// A checkpoint on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// The directory that holds its files, or the GGUF file that holds all of it.
    pub dir: PathBuf,
    /// The model's name for clients: the hub id, or the name of the directory or file.
    pub name: String,
}

impl Checkpoint {
    /// Opens a checkpoint's directory, which must contain a `config.json`, or a GGUF file.
    pub fn open(dir: &Path, name: impl Into<String>) -> Result<Self, Error> {
        if crate::gguf::is_file(dir) {
            return Ok(Self { dir: dir.to_owned(), name: name.into() });
        }
        let config = dir.join(CheckpointFile::Config.name());
        if !config.is_file() {
            let known = contents::of_folder(dir).map_or(String::new(), |known| format!("; {known}"));
            let message = format!("no {} in {}{known}", CheckpointFile::Config.name(), dir.display());
            return Err(Error::invalid("model", message));
        }
        Ok(Self { dir: dir.to_owned(), name: name.into() })
    }

    /// True if the checkpoint has a tokenizer. A GGUF file has one, or is refused when its text is read.
    pub fn has_tokenizer(&self) -> bool {
        crate::gguf::is_file(&self.dir) || self.dir.join(CheckpointFile::Tokenizer.name()).is_file()
    }

    /// Reads a file. `None` if the checkpoint has no such file.
    pub fn read(&self, file: CheckpointFile) -> Result<Option<Vec<u8>>, Error> {
        if crate::gguf::is_file(&self.dir) {
            return gguf::read(&self.dir, file);
        }
        let path = self.dir.join(file.name());
        match fs::read(&path) {
            Ok(bytes) => match contents::lfs_pointer(&bytes) {
                None => Ok(Some(bytes)),
                Some(problem) => Err(Error::invalid("model", format!("{} {problem}", path.display()))),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::invalid("model", format!("cannot read {}: {error}", path.display()))),
        }
    }
}

/// Brings the source's files onto this machine. `display` shows the progress of downloads. `check` is called with the
/// checkpoint's directory once the config is there, and before weights are downloaded.
///
/// # Errors
/// The error of `check`;
/// `InvalidArgument` or `NotFound` if the source cannot be served as named, `Unavailable` if the hub cannot be reached.
/// Each error names the source and a remedy.
pub async fn resolve(
    source: &ModelSource,
    wanted: Wanted,
    hub: &HubOptions,
    display: &LoadDisplay,
    check: CheckConfig<'_>,
) -> Result<Checkpoint, Error> {
    let checkpoint = bring(source, wanted, hub, display, check).await?;
    check(&checkpoint.dir)?;
    Ok(checkpoint)
}

/// A check of the config in a checkpoint's directory.
pub type CheckConfig<'a> = &'a (dyn Fn(&Path) -> Result<(), Error> + Sync);

async fn bring(
    source: &ModelSource,
    wanted: Wanted,
    hub: &HubOptions,
    display: &LoadDisplay,
    check: CheckConfig<'_>,
) -> Result<Checkpoint, Error> {
    match source {
        ModelSource::Directory(dir) => {
            let dir = fs::canonicalize(dir)
                .map_err(|e| Error::invalid("model", format!("cannot open {}: {e}", dir.display())))?;
            let name = dir.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy());
            match gguf::only_file(&dir) {
                Some(file) if !dir.join(CheckpointFile::Config.name()).exists() => {
                    Checkpoint::open(&file, name)
                }
                _ => Checkpoint::open(&dir, name),
            }
        }
        ModelSource::Gguf(file) => {
            let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty());
            let parent = fs::canonicalize(parent.unwrap_or(Path::new(".")))
                .map_err(|e| Error::invalid("model", format!("cannot open {}: {e}", file.display())))?;
            // The file's own name stays, because a link in a hub's cache leads to a file of another name.
            let file = parent.join(file.file_name().unwrap_or_default());
            let name = file.file_stem().map_or_else(|| "model".into(), |name| name.to_string_lossy());
            Checkpoint::open(&file, name)
        }
        ModelSource::Hub(id) => {
            check_cache()?;
            let dir = hub::download(id, wanted, hub, display, check).await?;
            Checkpoint::open(&dir, id.to_string())
        }
        ModelSource::Shipped => {
            check_cache()?;
            let dir = tokio::task::spawn_blocking(|| shipped::unpack(&cache_home()))
                .await
                .map_err(|e| Error::internal(format!("unpacking the shipped model: {e}")))??;
            Checkpoint::open(&dir, shipped::NAME)
        }
    }
}

/// The user's cache directory as in the XDG base directory specification. Without a home directory, it is a directory
/// in the temporary directory whose name contains the user's id.
fn cache_home() -> PathBuf {
    home_cache().unwrap_or_else(|| {
        let user = rustix::process::geteuid().as_raw();
        std::env::temp_dir().join(format!("tutti-cache-{user}"))
    })
}

fn home_cache() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))
}

/// Creates the cache directory if it lies in the temporary directory.
fn check_cache() -> Result<(), Error> {
    if home_cache().is_some() {
        return Ok(());
    }
    let cache = cache_home();
    make_private(&cache).map_err(|error| {
        let message = format!(
            "cannot keep files in {}: {error}; set XDG_CACHE_HOME to a directory of your own",
            cache.display()
        );
        model_error(ErrorKind::InvalidArgument, message)
    })
}

/// Makes a directory that only this user can write to, unless it exists. Everyone may write to its parent, so an entry
/// of that name may belong to another user, or be a link to elsewhere.
fn make_private(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => return made,
    }
    let found = path.symlink_metadata()?;
    let owner = found.uid();
    if !found.is_dir() || owner != rustix::process::geteuid().as_raw() || found.mode() & 0o022 != 0 {
        return Err(io::Error::other(format!(
            "it is of user {owner}, others may write to it, or it is a link"
        )));
    }
    Ok(())
}

/// An error about the source that `--model` names.
fn model_error(kind: ErrorKind, message: String) -> Error {
    Error::new(kind, message).with_field("model")
}

#[cfg(test)]
mod tests;
