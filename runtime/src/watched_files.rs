//! Files that are read again when they change: certificates, API keys and settings.
//!
//! Files are polled. inotify misses changes on network file systems, and Kubernetes replaces a volume's files by
//! exchanging a symbolic link.

use std::{
    fs,
    future::pending,
    os::unix::fs::MetadataExt,
    panic,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tokio::{task::spawn_blocking, time::sleep};

use crate::{Error, declare_metrics};

/// Interval at which files are checked for changes.
pub(crate) const CHECKED_EVERY: Duration = Duration::from_secs(1);

/// Content of files that are read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The API keys of clients.
    ApiKeys,
    /// The certificate of the ports that clients reach.
    PublicCertificates,
    /// The certificates of connections inside the cluster.
    ClusterCertificates,
}

impl Content {
    /// The content's name in log lines, in the plural.
    fn name(self) -> &'static str {
        match self {
            Self::ApiKeys => "the API keys",
            Self::PublicCertificates => "the certificates of the public ports",
            Self::ClusterCertificates => "the certificates of the cluster",
        }
    }

    fn label(self) -> FilesLabel {
        let files = match self {
            Self::ApiKeys => "api_keys",
            Self::PublicCertificates => "tls",
            Self::ClusterCertificates => "cluster_tls",
        };
        FilesLabel { files }
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct FilesLabel {
    files: &'static str,
}

declare_metrics! {
    /// Metrics of files that are read again. Clones share the metrics.
    #[derive(Clone, Debug, Default)]
    pub struct ReloadMetrics {
        failures: Family<FilesLabel, Counter>, "file_reload_failures",
            "Changes of files that could not be read again as a whole, by what the files have";
        expiry: Family<FilesLabel, Gauge>, "certificate_expiry_seconds",
            "Unix time at which the process's certificate ends to be valid, by its use";
    }
}

impl ReloadMetrics {
    /// The counter of failures. It is created before the first failure, because Prometheus does not see the first count
    /// of a new series as an increase.
    fn failures(&self, content: Content) -> Counter {
        self.failures.get_or_create(&content.label()).clone()
    }

    /// Records the time at which the certificate in force expires.
    pub(crate) fn expires(&self, content: Content, unix_seconds: Option<i64>) {
        if let Some(seconds) = unix_seconds {
            self.expiry.get_or_create(&content.label()).set(seconds);
        }
    }
}

/// Files, and their stamps at the last check.
#[derive(Clone, Debug)]
pub struct WatchedFiles {
    files: Vec<PathBuf>,
    seen: Vec<Option<Stamp>>,
}

/// Properties of a file that change with its content. The time is `st_ctime`, which also changes with the permissions,
/// so that a file is read again when it becomes readable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    changed: (i64, i64),
    bytes: u64,
    device_and_inode: (u64, u64),
}

impl Stamp {
    /// `None` if there is no such file.
    fn of(file: &Path) -> Option<Self> {
        let metadata = fs::metadata(file).ok()?;
        Some(Self {
            changed: (metadata.ctime(), metadata.ctime_nsec()),
            bytes: metadata.len(),
            device_and_inode: (metadata.dev(), metadata.ino()),
        })
    }
}

impl WatchedFiles {
    /// Takes the files' stamps. Call this before the first read of the files, so that a change in between is noticed.
    pub fn new(files: Vec<PathBuf>) -> Self {
        let seen = stamps(&files);
        Self { files, seen }
    }

    /// Calls `reload` on a thread for blocking calls whenever one of the files has changed since [`WatchedFiles::new`].
    /// Works only while the future is polled. An error is only logged and counted, so a failed `reload` must keep the
    /// old content.
    pub async fn follow(
        self,
        content: Content,
        metrics: &ReloadMetrics,
        reload: impl Fn() -> Result<(), Error> + Send + Sync + 'static,
    ) {
        let failures = metrics.failures(content);
        self.follow_every(CHECKED_EVERY, Failing { what: content.name(), failures }, reload).await;
    }

    /// Completes once one of the files has changed since the stamps were taken: by [`WatchedFiles::new`], by
    /// [`WatchedFiles::look`], or by the last completed call.
    pub async fn changed(&mut self) {
        loop {
            sleep(CHECKED_EVERY).await;
            let files = self.files.clone();
            // An error means that the Tokio runtime is shutting down.
            let Ok(now) = spawn_blocking(move || stamps(&files)).await else { return pending().await };
            if now != self.seen {
                self.seen = now;
                return;
            }
        }
    }

    /// Takes the files' stamps. Earlier changes are then ignored.
    pub fn look(&mut self) {
        self.seen = stamps(&self.files);
    }

    async fn follow_every(
        mut self,
        interval: Duration,
        failing: Failing,
        reload: impl Fn() -> Result<(), Error> + Send + Sync + 'static,
    ) {
        let reload = Arc::new(reload);
        loop {
            sleep(interval).await;
            let reload = reload.clone();
            let failing = failing.clone();
            let check = move || {
                self.check(&failing, &*reload);
                self
            };
            self = match spawn_blocking(check).await {
                Ok(files) => files,
                Err(error) if error.is_panic() => panic::resume_unwind(error.into_panic()),
                Err(_) => return, // The Tokio runtime is shutting down.
            };
        }
    }

    /// Calls `reload` if a file has changed.
    fn check(&mut self, failing: &Failing, reload: impl Fn() -> Result<(), Error>) {
        // The stamps are taken before `reload` reads the files, so that the next check notices a change during the
        // reload.
        let now = stamps(&self.files);
        if now == self.seen {
            return;
        }
        self.seen = now;
        let what = failing.what;
        match reload() {
            Ok(()) => tracing::info!(files = ?self.files, "read {what} again"),
            Err(error) => {
                failing.failures.inc();
                tracing::error!(%error, "could not read {what} again");
            }
        }
    }
}

/// The name of the files' content for the log, and the counter of failed reloads.
#[derive(Clone, Debug, Default)]
struct Failing {
    what: &'static str,
    failures: Counter,
}

fn stamps(files: &[PathBuf]) -> Vec<Option<Stamp>> {
    files.iter().map(|file| Stamp::of(file)).collect()
}

#[cfg(test)]
mod tests;
