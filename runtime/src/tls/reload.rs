//! Files that are read again when they change.

use std::{
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use crate::Error;

/// Interval at which files are checked for changes.
const CHECKED_EVERY: Duration = Duration::from_secs(1);

/// Properties of a file that change with its content; `None` if there is no such file.
type Stamp = Option<(SystemTime, u64, u64)>;

/// Files, and what was seen of them.
#[derive(Clone, Debug)]
pub(super) struct Watched {
    files: Vec<PathBuf>,
    seen: Vec<Stamp>,
}

impl Watched {
    /// Looks at the files. To be called before they are read for the first time, so that no change is missed.
    pub fn new(files: Vec<PathBuf>) -> Self {
        let seen = stamps(&files);
        Self { files, seen }
    }

    /// Calls `reload` whenever one of the files changes, as long as the future is polled. An error is logged and nothing
    /// else, so what was read before stays in force. `what` names the content in the log.
    pub async fn follow(mut self, what: &'static str, reload: impl Fn() -> Result<(), Error>) {
        loop {
            tokio::time::sleep(CHECKED_EVERY).await;
            let now = stamps(&self.files);
            if now == self.seen {
                continue;
            }
            self.seen = now;
            match reload() {
                Ok(()) => tracing::info!(files = ?self.files, "read {what} again"),
                Err(error) => tracing::error!(%error, "{what} stay as they were"),
            }
        }
    }
}

fn stamps(files: &[PathBuf]) -> Vec<Stamp> {
    files.iter().map(|file| stamp(file)).collect()
}

fn stamp(file: &Path) -> Stamp {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(file).ok()?;
    Some((metadata.modified().ok()?, metadata.len(), metadata.ino()))
}
