//! Checkpoints from a model hub, kept in hf-hub's cache, which Python's huggingface_hub shares.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    path::{Path, PathBuf},
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use hf_hub::{
    Cache, Repo, RepoType,
    api::{
        RepoInfo,
        tokio::{Api, ApiBuilder, ApiError, ApiRepo, Progress},
    },
};
use serde::Deserialize;

use super::{CheckConfig, CheckpointFile, Wanted, cache_home, contents, gguf, model_error};
use crate::{Error, ErrorKind, progress::LoadDisplay};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const GGUF: &str = ".gguf";
/// The revision that is downloaded.
const REVISION: &str = "main";
/// Maximum time for the hub's answer to the first request, which asks for the model's revision and files.
const ANSWER: Duration = Duration::from_secs(30);

/// A model's name on a hub: `org/name`, or `name` alone. `org/name/file.gguf` names a GGUF file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubId {
    repo: String,
    /// The path of a GGUF file in the repository.
    file: Option<String>,
}

impl FromStr for HubId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split('/').collect();
        let has_file = parts.len() > 2 && text.ends_with(GGUF);
        let (of_repo, of_file) = parts.split_at(if has_file { 2 } else { parts.len() });
        if of_repo.len() > 2 {
            return Err(
                "there is no such directory, and an id has at most one \"/\", or is ORG/NAME/FILE.gguf"
                    .into(),
            );
        }
        for part in &parts {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            if part.is_empty() || part.len() > 96 || !part.chars().all(plain) {
                return Err(format!("{part:?} is not 1 to 96 letters, digits, \"-\", \"_\" and \".\""));
            }
        }
        for part in of_repo {
            let edge = |c: char| c == '-' || c == '.';
            let twice = part.contains("--") || part.contains("..");
            if twice || part.starts_with(edge) || part.ends_with(edge) || part.ends_with(".git") {
                return Err(format!("there is no such directory, and {part:?} is not how ids are spelt"));
            }
        }
        if let Some(part) = of_file.iter().find(|part| part.starts_with('.')) {
            return Err(format!("{part:?} is not how files of a hub are spelt"));
        }
        Ok(Self { repo: of_repo.join("/"), file: has_file.then(|| of_file.join("/")) })
    }
}

impl fmt::Display for HubId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repo)?;
        self.file.iter().try_for_each(|file| write!(f, "/{file}"))
    }
}

impl HubId {
    /// The path of the checkpoint in the directory of a commit.
    fn path_in(&self, commit_dir: PathBuf) -> PathBuf {
        match &self.file {
            Some(file) => commit_dir.join(file),
            None => commit_dir,
        }
    }
}

/// The hub's address, the access token, and the cache.
#[derive(Clone)]
pub struct HubOptions {
    /// The hub's address. `None` is hf-hub's default.
    pub endpoint: Option<String>,
    /// Access token, sent as a bearer token.
    pub token: Option<String>,
    /// The cache directory, in the layout of huggingface_hub.
    pub cache: PathBuf,
    /// If true, only cached files are used.
    pub offline: bool,
}

impl HubOptions {
    /// Reads the options from the environment variables `HF_ENDPOINT`, `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN` and
    /// `HF_HUB_OFFLINE`. If `HF_TOKEN` is not set, the token is read from the file that a login left in `HF_HOME`.
    pub fn from_env() -> Self {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let given = |name| variable(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
        let home = given("HF_HOME").map_or_else(|| cache_home().join("huggingface"), PathBuf::from);
        let cache = given("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from);
        // The token file is in `HF_HOME`, even if the cache is elsewhere.
        let token = given("HF_TOKEN").or_else(|| Cache::new(home.join("hub")).token());
        let offline = given("HF_HUB_OFFLINE")
            .is_some_and(|v| ["1", "on", "yes", "true"].contains(&v.to_ascii_lowercase().as_str()));
        Self { endpoint: given("HF_ENDPOINT"), token, cache, offline }
    }

    fn api(&self) -> Result<Api, Error> {
        let mut builder = ApiBuilder::from_cache(Cache::new(self.cache.clone()))
            .with_progress(false)
            .with_token(self.token.clone());
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint.trim_end_matches('/').to_owned());
        }
        builder.build().map_err(|e| Error::internal(format!("cannot make a hub client: {e}")))
    }
}

/// Formats without the token, which must not appear in logs.
impl fmt::Debug for HubOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubOptions")
            .field("endpoint", &self.endpoint)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("cache", &self.cache)
            .field("offline", &self.offline)
            .finish()
    }
}

/// Downloads the missing files of a model's main revision. Returns the directory that contains them, or the GGUF file
/// that the id names.
pub(super) async fn download(
    id: &HubId,
    wanted: Wanted,
    options: &HubOptions,
    display: &LoadDisplay,
    check: CheckConfig<'_>,
) -> Result<PathBuf, Error> {
    let cache = Cache::new(options.cache.clone());
    let main = repo(id, REVISION);
    if options.offline {
        return cached(&cache, &main, id, wanted).ok_or_else(|| {
            let message = format!(
                "{id} is not complete in {}, and HF_HUB_OFFLINE is set: unset it to download",
                options.cache.display()
            );
            model_error(ErrorKind::NotFound, message)
        });
    }

    let api = options.api()?;
    let asked = api.repo(main.clone());
    let info = match tokio::time::timeout(ANSWER, asked.info()).await {
        Ok(Ok(info)) => info,
        failed => {
            let error = match failed {
                Ok(Err(error)) => explain(id, &asked, options, &error),
                _ => unreachable_hub(id, &asked, &format!("no answer within {ANSWER:?}")),
            };
            // If the hub cannot be reached, a cached copy is served. If the hub refuses the request, that is final.
            return match cached(&cache, &main, id, wanted) {
                Some(dir) if error.kind() == ErrorKind::Unavailable => {
                    tracing::warn!(%error, dir = %dir.display(), "serving the cached copy");
                    Ok(dir)
                }
                _ => Err(error),
            };
        }
    };
    if info.sha.is_empty() || !info.sha.bytes().all(|b| b.is_ascii_alphanumeric()) {
        return Err(Error::internal(format!("the hub gave {:?} as the revision of {id}", info.sha)));
    }

    // All files come from one commit, even if the branch moves during the download.
    let download = Download {
        repo: api.repo(repo(id, &info.sha)),
        commit_dir: cache.repo(main.clone()).pointer_path(&info.sha),
        id,
        options,
        display,
    };
    match &id.file {
        // The file is the checkpoint, so it is needed even if no weights are.
        Some(file) => download.gguf(&info, file).await?,
        None => {
            download.text_files(&info).await?;
            check(&download.commit_dir)?;
            if wanted == Wanted::Everything {
                download.weights(&info).await?;
            }
        }
    }
    cache
        .repo(main)
        .create_ref(&info.sha)
        .map_err(|e| Error::internal(format!("cannot write to {}: {e}", options.cache.display())))?;
    Ok(id.path_in(download.commit_dir))
}

/// The download of one commit of one model into the cache.
struct Download<'a> {
    repo: ApiRepo,
    /// The directory in the cache where the commit's files appear.
    commit_dir: PathBuf,
    id: &'a HubId,
    options: &'a HubOptions,
    display: &'a LoadDisplay,
}

impl Download<'_> {
    async fn text_files(&self, info: &RepoInfo) -> Result<(), Error> {
        for file in CheckpointFile::ALL {
            // The config is requested even if the hub does not list it. No model can be served without a config, so the
            // hub's refusal becomes the error.
            if file == CheckpointFile::Config || lists(info, file.name()) {
                self.file(file.name()).await?;
            }
        }
        Ok(())
    }

    async fn weights(&self, info: &RepoInfo) -> Result<(), Error> {
        if lists(info, SINGLE) {
            return self.file(SINGLE).await;
        }
        if !lists(info, INDEX) {
            let known = contents::of_names(info.siblings.iter().map(|file| file.rfilename.as_str()));
            let known = known.map_or(String::new(), |known| format!("; {known}"));
            let message =
                format!("{} has no safetensors weights: neither {SINGLE} nor {INDEX}{known}", self.id);
            return Err(model_error(ErrorKind::InvalidArgument, message));
        }
        self.file(INDEX).await?;
        let shards = shards(&self.commit_dir).map_err(|problem| {
            model_error(ErrorKind::InvalidArgument, format!("{}: {INDEX}: {problem}", self.id))
        })?;
        for shard in shards {
            self.file(&shard).await?;
        }
        Ok(())
    }

    /// Downloads all parts of the GGUF file `named`.
    async fn gguf(&self, info: &RepoInfo, named: &str) -> Result<(), Error> {
        for part in gguf::files(Path::new(named)) {
            let part = part.to_string_lossy();
            if !lists(info, &part) {
                let names = info.siblings.iter().map(|file| file.rfilename.as_str());
                let files = Vec::from_iter(names.filter(|name| name.ends_with(GGUF)).take(20)).join(", ");
                let has = if files.is_empty() { "none".into() } else { files };
                let message = format!("{}: the model has no file {part}; its GGUF files: {has}", self.id);
                return Err(model_error(ErrorKind::NotFound, message));
            }
            self.file(&part).await?;
        }
        Ok(())
    }

    async fn file(&self, name: &str) -> Result<(), Error> {
        if self.commit_dir.join(name).exists() {
            return Ok(());
        }
        tracing::info!(model = %self.id, file = name, "downloading");
        let progress = FileProgress { display: self.display.clone(), ..FileProgress::default() };
        let loaded = self.repo.download_with_progress(name, progress).await;
        loaded.map(drop).map_err(|error| {
            self.display.abandon(name);
            explain(self.id, &self.repo, self.options, &error)
        })
    }
}

fn repo(id: &HubId, revision: &str) -> Repo {
    Repo::with_revision(id.repo.clone(), RepoType::Model, revision.to_owned())
}

fn lists(info: &RepoInfo, name: &str) -> bool {
    info.siblings.iter().any(|file| file.rfilename == name)
}

/// The cached checkpoint of a model's main revision. None if a wanted file is missing.
fn cached(cache: &Cache, main: &Repo, id: &HubId, wanted: Wanted) -> Option<PathBuf> {
    let cached = cache.repo(main.clone());
    if let Some(file) = &id.file {
        let parts = gguf::files(Path::new(file));
        let complete = parts.iter().all(|part| cached.get(&part.to_string_lossy()).is_some());
        return complete.then(|| cached.get(file)).flatten();
    }
    let config = cached.get(CheckpointFile::Config.name())?;
    let commit_dir = config.parent()?.to_owned();
    let complete = match wanted {
        Wanted::NoWeights => true,
        Wanted::Everything => {
            commit_dir.join(SINGLE).exists()
                || shards(&commit_dir).is_ok_and(|shards| shards.iter().all(|s| commit_dir.join(s).exists()))
        }
    };
    complete.then_some(commit_dir)
}

/// The weight files that a directory's index lists. Each must be a plain file name, because it becomes a path.
fn shards(dir: &Path) -> Result<BTreeSet<String>, String> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }

    let text = fs::read(dir.join(INDEX)).map_err(|e| e.to_string())?;
    let index: Index = serde_json::from_slice(&text).map_err(|e| e.to_string())?;
    let files: BTreeSet<String> = index.weight_map.into_values().collect();
    match files.iter().find(|file| !file.ends_with(".safetensors") || file.contains(['/', '\\'])) {
        Some(file) => Err(format!("{file:?} is not the name of a safetensors file beside it")),
        None => Ok(files),
    }
}

/// Explains a failed request to the operator.
fn explain(id: &HubId, asked: &ApiRepo, options: &HubOptions, error: &ApiError) -> Error {
    let ApiError::RequestError(request) = error else {
        return Error::internal(format!("downloading {id} into {}: {error}", options.cache.display()));
    };
    let Some(status) = request.status() else {
        return unreachable_hub(id, asked, &root_cause(request));
    };
    let url = request.url().map_or_else(|| asked.url(""), ToString::to_string);
    match status.as_u16() {
        401 | 403 => {
            let token = match options.token {
                Some(_) => "the token sent may not read it: check HF_TOKEN and the model's terms of access",
                None => "no such model, or one that needs HF_TOKEN; no token was sent",
            };
            model_error(ErrorKind::InvalidArgument, format!("{id}: {url} answered {status}: {token}"))
        }
        404 => {
            let hint = "no such model or file; give a directory, or check the id and HF_ENDPOINT";
            model_error(ErrorKind::NotFound, format!("{id}: {url} answered {status}: {hint}"))
        }
        _ => model_error(ErrorKind::Unavailable, format!("{id}: {url} answered {status}")),
    }
}

fn unreachable_hub(id: &HubId, asked: &ApiRepo, why: &str) -> Error {
    let url = asked.url("");
    let hub = url.split_once(&format!("/{}/", id.repo)).map_or(&*url, |(hub, _)| hub);
    let message = format!(
        "{id}: cannot reach the hub at {hub}: {why}; check HF_ENDPOINT and the network, or give a directory"
    );
    model_error(ErrorKind::Unavailable, message)
}

/// The root cause of an HTTP client's error. The outermost error only says that sending failed.
fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

/// Progress of one file's download. Clones share `done`: hf-hub makes one clone per part of the file.
#[derive(Clone, Default)]
struct FileProgress {
    display: LoadDisplay,
    name: Arc<str>,
    done: Arc<AtomicU64>,
    total: u64,
}

impl Progress for FileProgress {
    async fn init(&mut self, size: usize, name: &str) {
        (self.name, self.total) = (name.into(), size as u64);
        self.display.update(&self.name, 0, self.total);
    }

    async fn update(&mut self, size: usize) {
        let done = self.done.fetch_add(size as u64, Ordering::Relaxed) + size as u64;
        // `done` is clamped, because hf-hub requests one byte beyond the end.
        self.display.update(&self.name, done.min(self.total), self.total);
    }

    async fn finish(&mut self) {
        self.display.update(&self.name, self.total, self.total);
    }
}

#[cfg(test)]
mod tests;
