//! API keys: the callers that may send requests, and their limits.
//!
//! The file of keys has the hash of each key, never the key itself. A key is looked up by a keyed hash ([`table`]). The
//! number of wrong keys is limited per client address ([`wrong_keys`]). The file is read again when it changes. The
//! usage counted against a key's limits is kept as long as the file has the key's name.

mod bucket;
mod entry;
mod file;
pub mod revocation;
mod salt;
mod share;
mod table;
mod wrong_keys;

use std::{
    collections::HashMap,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use axum::http::{Extensions, HeaderMap};
use futures_util::future::BoxFuture;
use parking_lot::{Mutex, RwLock};
use prometheus_client::encoding::EncodeLabelSet;
use tutti_runtime::{
    Error, ErrorKind,
    command_line::processes::ROUTER,
    declare_metrics,
    live::Live,
    metrics::{
        Metrics,
        metrics::{counter::Counter, family::Family, gauge::Gauge},
    },
    serve::Peer,
    watched_files::{Content, ReloadMetrics, WatchedFiles},
};
use tutti_settings::{KeyFileGone, RevokedRequests, RouterSettings};

use self::{
    bucket::Bucket,
    entry::Running,
    file::{KeyFile, KeyLine},
    revocation::Revocation,
    table::KeyTable,
    wrong_keys::WrongKeys,
};
pub use self::{entry::Entry, salt::ClientSalt, share::Share};

/// Time after which a request over the limit of concurrent choices may be sent again. The time is fixed, because the
/// end of the running requests is unknown.
const RETRY_AFTER: Duration = Duration::from_secs(1);
const SETTING: &str = "api_key_file";
/// Maximum number of lines with mistakes that are logged per read of the file.
const MISTAKES_LOGGED: usize = 20;

/// The keys of a front door.
pub struct ApiKeys {
    /// `None` if no API key is required.
    file: Option<PathBuf>,
    watched: WatchedFiles,
    settings: Live<RouterSettings>,
    table: RwLock<Arc<KeyTable>>,
    wrong_keys: WrongKeys,
    metrics: KeyMetrics,
    reloads: ReloadMetrics,
}

/// One key with its limits, and the usage counted against them.
struct ApiKey {
    line: KeyLine,
    usage: Arc<KeyUsage>,
    revocation: Arc<Revocation>,
}

struct KeyUsage {
    name: String,
    share: Share,
    state: Mutex<UsageState>,
    metrics: KeyMetrics,
}

struct UsageState {
    /// Number of running choices. A request whose number of choices is not known yet counts as one.
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

/// Metrics of keys.
#[derive(Clone)]
struct KeyMetrics {
    of_keys: OfKeys,
    of_file: KeyFileMetrics,
}

declare_metrics! {
    /// Metrics that name keys. Only operators may read them.
    #[derive(Clone)]
    struct OfKeys {
        requests: Family<KeyLabel, Counter>, "key_requests", "Requests let in, by the name of their API key";
        running: Family<KeyLabel, Gauge>, "key_requests_in_flight", "Requests now running, by API key";
        tokens: Family<KeyLabel, Counter>, "key_tokens", "Tokens of prompts and outputs, by API key";
        refused: Family<RefusalLabel, Counter>, "key_requests_refused",
            "Requests refused for a limit of their API key, by key and limit";
    }
}

declare_metrics! {
    /// Metrics of the file of keys as a whole. They name no key.
    #[derive(Clone)]
    struct KeyFileMetrics {
        unknown: Counter, "requests_unauthenticated", "Requests without a valid API key";
        guesses: Counter, "requests_refused_for_wrong_keys",
            "Requests refused before their API key was looked at: their address had shown too many wrong ones";
        in_force: Gauge, "api_keys", "API keys in force";
        mistakes: Gauge, "api_key_file_mistakes", "Lines of the file of API keys that are left out";
    }
}

/// Checks the file of API keys at startup. A mistake in the file is then a usage error. Later reads of the file leave
/// out lines with mistakes.
pub fn check_api_keys(settings: &RouterSettings) -> Result<(), Error> {
    let Some(file) = settings.api_key_file.as_deref() else { return Ok(()) };
    match read(file)?.mistakes.first() {
        None => Ok(()),
        Some(mistake) => Err(Error::invalid(SETTING, format!("{}: {mistake}", file.display()))),
    }
}

/// Reads a file.
fn read(file: &Path) -> Result<KeyFile, Error> {
    let bytes = std::fs::read(file)
        .map_err(|error| Error::invalid(SETTING, format!("cannot read {}: {error}", file.display())))?;
    Ok(file::parse(&bytes))
}

impl ApiKeys {
    /// Reads the keys from the file that the settings name. Without a file, every caller is let in.
    pub fn read(settings: Live<RouterSettings>, metrics: &Metrics) -> Result<Arc<Self>, Error> {
        let file = settings.get().api_key_file.clone();
        let keys = Self {
            watched: WatchedFiles::new(file.iter().cloned().collect()),
            table: RwLock::new(Arc::new(KeyTable::new()?)),
            wrong_keys: WrongKeys::default(),
            metrics: KeyMetrics {
                of_keys: metrics.register_named(ROUTER.name, OfKeys::register),
                of_file: metrics.register_of(ROUTER.name, KeyFileMetrics::register),
            },
            reloads: metrics.reloads(),
            settings,
            file,
        };
        if let Some(file) = &keys.file {
            keys.install(read(file)?, file);
        }
        Ok(Arc::new(keys))
    }

    /// True if callers need a key.
    pub fn are_needed(&self) -> bool {
        self.file.is_some()
    }

    /// Finds the caller of a request by its `authorization` header, `Bearer KEY`, or its `x-api-key` header. The time
    /// of the lookup does not depend on the number of keys.
    pub fn caller(&self, headers: &HeaderMap, extensions: &Extensions) -> Result<Caller, Error> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let address = match extensions.get() {
            Some(Peer::Ip(address)) => Some(Peer::network(*address)),
            Some(Peer::Local) | None => None,
        };
        self.identify(text("authorization"), text("x-api-key"), address)
    }

    fn identify(
        &self,
        authorization: Option<&str>,
        api_key: Option<&str>,
        address: Option<IpAddr>,
    ) -> Result<Caller, Error> {
        if !self.are_needed() {
            return Ok(Caller(None));
        }
        let bearer = authorization.and_then(|value| {
            let (scheme, key) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
        });
        let Some(shown) = bearer.or(api_key) else {
            self.metrics.of_file.unknown.inc();
            let message = "an API key is required: send it as the header `authorization: Bearer KEY` or `x-api-key: KEY`";
            return Err(Error::new(ErrorKind::Unauthenticated, message));
        };
        let (per_minute, now) = (self.settings.get().max_wrong_keys_per_minute, Instant::now());
        if let Some(after) = address.and_then(|address| self.wrong_keys.refuse(address, per_minute, now)) {
            self.metrics.of_file.guesses.inc();
            let message =
                format!("more than {per_minute} wrong API keys have come from this address in a minute");
            return Err(Error::rate_limited(message, after));
        }
        let table = self.table.read().clone();
        match table.find(shown) {
            Some(key) => {
                address.inspect(|address| self.wrong_keys.right(*address, now));
                Ok(Caller(Some(key.clone())))
            }
            None => {
                address.inspect(|address| self.wrong_keys.wrong(*address, per_minute, now));
                self.metrics.of_file.unknown.inc();
                Err(Error::new(ErrorKind::Unauthenticated, "the API key is not known here"))
            }
        }
    }

    /// Returns a future that completes when the caller's key is revoked and its running requests must end. `None` if no
    /// key is required.
    pub fn revoked(&self, caller: &Caller) -> Option<BoxFuture<'static, ()>> {
        let revoked = caller.0.as_ref()?.revocation.revoked();
        let settings = self.settings.clone();
        Some(Box::pin(async move {
            revoked.await;
            if settings.get().revoked_requests == RevokedRequests::Finish {
                std::future::pending::<()>().await;
            }
        }))
    }

    /// Reads the file again whenever it changes, for as long as the future is polled.
    pub async fn follow(self: Arc<Self>) {
        let Some(file) = self.file.clone() else { return };
        let (watched, reloads) = (self.watched.clone(), self.reloads.clone());
        watched.follow(Content::ApiKeys, &reloads, move || self.reload(&file)).await;
    }

    /// Reads the file again. If the file can be read, exactly the keys on its lines without mistakes are accepted
    /// afterwards. An unreadable file or a mistake is an error, which counts as a failed reload.
    fn reload(&self, file: &Path) -> Result<(), Error> {
        let read = match (read(file), self.settings.get().api_key_file_gone) {
            (Ok(read), _) => read,
            (Err(error), KeyFileGone::Keep) => {
                let message = format!("{}; the keys stay as they were (api_key_file_gone)", error.message());
                return Err(Error::invalid(SETTING, message));
            }
            (Err(error), KeyFileGone::Deny) => {
                self.install(KeyFile::default(), file);
                let message = format!("{}; no key is accepted (api_key_file_gone)", error.message());
                return Err(Error::invalid(SETTING, message));
            }
        };
        let mistakes = read.mistakes.len();
        self.install(read, file);
        if mistakes == 0 {
            return Ok(());
        }
        let message =
            format!("{} has {mistakes} lines with mistakes; its other keys are in force", file.display());
        Err(Error::invalid(SETTING, message))
    }

    /// Replaces the keys. A key whose name stays keeps its counted usage. A key whose name or hash is not in the new
    /// file is revoked.
    fn install(&self, read: KeyFile, file: &Path) {
        let KeyFile { keys: lines, mistakes } = read;
        for mistake in mistakes.iter().take(MISTAKES_LOGGED) {
            tracing::warn!(file = %file.display(), "{mistake}; the line is left out");
        }
        if lines.is_empty() {
            tracing::warn!(file = %file.display(), "there are no API keys: no caller is let in");
        } else {
            tracing::info!(keys = lines.len(), "API keys are in force");
        }
        self.metrics.of_file.in_force.set(lines.len() as i64);
        self.metrics.of_file.mistakes.set(mistakes.len() as i64);
        let mut table = self.table.write();
        let mut known: HashMap<&str, &Arc<ApiKey>> =
            table.keys().map(|key| (key.line.name.as_str(), key)).collect();
        let now = Instant::now();
        let mut keys = Vec::with_capacity(lines.len());
        for line in lines {
            let before = known.get(line.name.as_str()).copied();
            let fresh = || Arc::new(KeyUsage::new(line.name.clone(), self.metrics.clone(), now));
            let usage = before.map_or_else(fresh, |key| Arc::clone(&key.usage));
            let same = before.filter(|key| key.line.hash == line.hash);
            let revocation = same.map_or_else(Arc::default, |key| Arc::clone(&key.revocation));
            if same.is_some() {
                known.remove(line.name.as_str());
            }
            keys.push(Arc::new(ApiKey { line, usage, revocation }));
        }
        let revoked: Vec<Arc<ApiKey>> = known.into_values().cloned().collect();
        let new = table.with(keys);
        *table = Arc::new(new);
        drop(table);
        for key in revoked {
            tracing::info!(key = key.line.name, "an API key is no longer accepted");
            key.revocation.revoke();
        }
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
        self.metrics.of_keys.refused.get_or_create(&label).inc();
        Error::rate_limited(message, after)
    }
}

/// The caller of a request: the holder of a key, or anyone if no keys are needed.
#[derive(Clone, Default)]
pub struct Caller(Option<Arc<ApiKey>>);

impl Caller {
    /// The name of the caller's key; `None` if no key is needed.
    pub fn name(&self) -> Option<&str> {
        self.0.as_ref().map(|key| key.line.name.as_str())
    }

    /// True if the caller may see the ids that others gave to their requests: an operator's key, or any caller if no
    /// key is needed.
    pub fn sees_request_ids(&self) -> bool {
        self.0.as_ref().is_none_or(|key| key.line.operator)
    }

    /// The name of the caller's key, if the key has the right of an operator.
    pub fn operator(&self) -> Option<&str> {
        self.0.as_ref().filter(|key| key.line.operator).map(|key| key.line.name.as_str())
    }

    /// Admits a request, or refuses it because a limit of the caller's key is reached.
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
        // The request's number of tokens is known only after its body is read. Here it is enough that the bucket is not
        // empty.
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
        usage.metrics.of_keys.requests.get_or_create(&usage.label()).inc();
        usage.metrics.of_keys.running.get_or_create(&usage.label()).inc();
        Ok(Entry::new(Running::new(self.clone())))
    }
}

/// Parses the text of a file, for fuzzers. Asserts that the names and hashes of accepted keys are unique.
#[cfg(feature = "fuzzing")]
pub fn read_lines(text: &str) {
    let KeyFile { keys, .. } = file::parse(text.as_bytes());
    let names: std::collections::HashSet<_> = keys.iter().map(|key| &key.name).collect();
    let hashes: std::collections::HashSet<_> = keys.iter().map(|key| key.hash).collect();
    assert!(names.len() == keys.len() && hashes.len() == keys.len());
}

#[cfg(test)]
mod tests;
