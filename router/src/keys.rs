//! API keys: the callers that may send requests, and their limits.
//!
//! The file has the hash of each key and never the key itself. A key is compared with all hashes, in constant time. The
//! file is read again when it changes, and a key keeps the state of its limits as long as its name stays.

mod bucket;
mod entry;
mod file;
mod share;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Mutex, RwLock};
use prometheus_client::encoding::EncodeLabelSet;
use ring::digest::{SHA256, digest};
use subtle::ConstantTimeEq;
use tutti_runtime::{
    Error, ErrorKind,
    command_line::processes::ROUTER,
    declare_metrics,
    metrics::{
        Metrics,
        metrics::{counter::Counter, family::Family, gauge::Gauge},
    },
    watched_files::WatchedFiles,
};
use tutti_settings::RouterSettings;

use self::{bucket::Bucket, entry::Running, file::KeyLine};
pub use self::{entry::Entry, share::Share};

/// Time after which a request over the limit of concurrency may be sent again. The end of the running requests cannot
/// be foreseen.
const RETRY_AFTER: Duration = Duration::from_secs(1);
const SETTING: &str = "api_key_file";

/// The keys of a front door.
pub struct ApiKeys {
    /// `None` if every caller is let in.
    file: Option<PathBuf>,
    watched: WatchedFiles,
    table: RwLock<Arc<Vec<Arc<ApiKey>>>>,
    metrics: KeyMetrics,
}

/// One key with its limits, and what its caller has used of them.
struct ApiKey {
    line: KeyLine,
    usage: Arc<KeyUsage>,
}

struct KeyUsage {
    name: String,
    share: Share,
    state: Mutex<UsageState>,
    metrics: KeyMetrics,
}

struct UsageState {
    /// Choices that run. A request whose number of choices is not known yet counts as one.
    running: u32,
    requests: Bucket,
    tokens: Bucket,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct KeyLabel {
    key: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RefusalLabel {
    key: String,
    limit: &'static str,
}

declare_metrics! {
    #[derive(Clone)]
    struct KeyMetrics {
        requests: Family<KeyLabel, Counter>, "key_requests", "Requests let in, by the name of their API key";
        running: Family<KeyLabel, Gauge>, "key_requests_in_flight", "Requests now running, by API key";
        tokens: Family<KeyLabel, Counter>, "key_tokens", "Tokens of prompts and outputs, by API key";
        refused: Family<RefusalLabel, Counter>, "key_requests_refused",
            "Requests refused for a limit of their API key, by key and limit";
        unknown: Counter, "requests_unauthenticated", "Requests without a valid API key";
    }
}

/// Checks the file of API keys before anything starts: an error of the file is then an error of usage at once.
pub fn check_api_keys(settings: &RouterSettings) -> Result<(), Error> {
    settings.api_key_file.as_deref().map_or(Ok(()), |file| lines(file).map(drop))
}

/// Reads the lines of a file.
fn lines(file: &Path) -> Result<Vec<KeyLine>, Error> {
    let invalid = |problem: String| Error::invalid(SETTING, problem);
    let text = std::fs::read_to_string(file)
        .map_err(|error| invalid(format!("cannot read {}: {error}", file.display())))?;
    file::parse(&text).map_err(|problem| invalid(format!("{}: {problem}", file.display())))
}

impl ApiKeys {
    /// Reads the keys from a file. Without a file, every caller is let in.
    pub fn read(file: Option<&Path>, metrics: &Metrics) -> Result<Arc<Self>, Error> {
        let keys = Self {
            file: file.map(Path::to_owned),
            watched: WatchedFiles::new(file.into_iter().map(Path::to_owned).collect()),
            table: RwLock::default(),
            metrics: metrics.register_of(ROUTER.name, KeyMetrics::register),
        };
        if let Some(file) = file {
            keys.install(lines(file)?);
        }
        Ok(Arc::new(keys))
    }

    /// True if callers need a key.
    pub fn are_needed(&self) -> bool {
        self.file.is_some()
    }

    /// Finds the caller of a request by the value of its `authorization` header, `Bearer KEY`, or of its `x-api-key`
    /// header.
    pub fn identify(&self, authorization: Option<&str>, api_key: Option<&str>) -> Result<Caller, Error> {
        if !self.are_needed() {
            return Ok(Caller(None));
        }
        let bearer = authorization.and_then(|value| {
            let (scheme, key) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
        });
        let Some(given) = bearer.or(api_key) else {
            self.metrics.unknown.inc();
            let message = "an API key is required: send it as the header `authorization: Bearer KEY`";
            return Err(Error::new(ErrorKind::Unauthenticated, message));
        };
        let hash = digest(&SHA256, given.as_bytes());
        let table = self.table.read().clone();
        // All hashes are compared, so that the time of the search does not reveal which of them is similar.
        let found = table.iter().fold(None, |found, key| {
            if bool::from(key.line.hash[..].ct_eq(hash.as_ref())) { Some(key) } else { found }
        });
        match found {
            Some(key) => Ok(Caller(Some(key.clone()))),
            None => {
                self.metrics.unknown.inc();
                Err(Error::new(ErrorKind::Unauthenticated, "the API key is not known here"))
            }
        }
    }

    /// Reads the file again whenever it changes, for as long as the future is polled. A file that cannot be read leaves
    /// the keys as they are.
    pub async fn follow(self: Arc<Self>) {
        let Some(file) = self.file.clone() else { return };
        let watched = self.watched.clone();
        let reload = move || {
            self.install(lines(&file)?);
            Ok(())
        };
        watched.follow("the API keys", reload).await;
    }

    /// Replaces the keys. A key whose name stays keeps the record of its use.
    fn install(&self, lines: Vec<KeyLine>) {
        tracing::info!(keys = lines.len(), "API keys are in force");
        let mut table = self.table.write();
        let known: HashMap<&str, &Arc<KeyUsage>> =
            table.iter().map(|key| (key.line.name.as_str(), &key.usage)).collect();
        let now = Instant::now();
        let keys = lines.into_iter().map(|line| {
            let fresh = || Arc::new(KeyUsage::new(line.name.clone(), self.metrics.clone(), now));
            let usage = known.get(line.name.as_str()).map_or_else(fresh, |usage| Arc::clone(usage));
            Arc::new(ApiKey { line, usage })
        });
        let keys = keys.collect();
        *table = Arc::new(keys);
    }
}

impl KeyUsage {
    fn new(name: String, metrics: KeyMetrics, now: Instant) -> Self {
        let state = UsageState { running: 0, requests: Bucket::full(now), tokens: Bucket::full(now) };
        Self { share: Share::of_key(&name), name, state: Mutex::new(state), metrics }
    }

    fn label(&self) -> KeyLabel {
        KeyLabel { key: self.name.clone() }
    }

    /// Counts a refusal, and returns its error.
    fn refuse(&self, limit: &'static str, message: String, after: Duration) -> Error {
        let label = RefusalLabel { key: self.name.clone(), limit };
        self.metrics.refused.get_or_create(&label).inc();
        Error::rate_limited(message, after)
    }
}

/// The caller of a request: the holder of a key, or anyone if no keys are needed.
#[derive(Clone)]
pub struct Caller(Option<Arc<ApiKey>>);

impl Caller {
    /// Lets a request in, or refuses it for a limit of the caller.
    pub fn enter(&self) -> Result<Entry, Error> {
        match &self.0 {
            None => Ok(Entry::default()),
            Some(key) => key.enter(Instant::now()),
        }
    }
}

impl ApiKey {
    fn enter(self: &Arc<Self>, now: Instant) -> Result<Entry, Error> {
        let (limits, usage) = (&self.line, &self.usage);
        let refuse =
            |limit: &'static str, message: String, after: Duration| Err(usage.refuse(limit, message, after));
        let mut state = usage.state.lock();
        if let Some(most) = limits.concurrent.filter(|&most| state.running >= most) {
            let message = entry::too_many_run(state.running, 1, most);
            return refuse("concurrent", message, RETRY_AFTER);
        }
        // The number of tokens is known only once the body is read. Until then it is enough that there are any.
        if let Some(per_minute) = limits.tokens_per_minute
            && let Err(after) = state.tokens.is_positive(per_minute, now)
        {
            return refuse(
                "tokens",
                format!("the limit of {per_minute} tokens per minute is reached"),
                after,
            );
        }
        if let Some(per_minute) = limits.requests_per_minute
            && let Err(after) = state.requests.take_one(per_minute, now)
        {
            return refuse(
                "requests",
                format!("the limit of {per_minute} requests per minute is reached"),
                after,
            );
        }
        state.running += 1;
        drop(state);
        usage.metrics.requests.get_or_create(&usage.label()).inc();
        usage.metrics.running.get_or_create(&usage.label()).inc();
        Ok(Entry::new(Running::new(self.clone())))
    }
}

/// Reads the text of a file, for fuzzers: names and hashes of keys that are accepted are unique.
#[cfg(fuzzing)]
pub fn read_lines(text: &str) {
    let Ok(keys) = file::parse(text) else { return };
    let names: std::collections::HashSet<_> = keys.iter().map(|key| &key.name).collect();
    let hashes: std::collections::HashSet<_> = keys.iter().map(|key| key.hash).collect();
    assert!(!keys.is_empty() && names.len() == keys.len() && hashes.len() == keys.len());
}

#[cfg(test)]
mod tests;
