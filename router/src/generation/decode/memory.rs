//! The memory of all media, and the part of it that a request holds.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tutti_media::{MediaError, Memory};
use tutti_runtime::Error;

use crate::{
    bound::{Bound, Held, for_large},
    keys::Share,
};

/// Time after which a request that found no room may be sent again.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Memory of all media.
pub(super) struct MediaMemory {
    limit: u64,
    pub(super) held: Mutex<Bound>,
}

/// The memory of one request's media. Dropping it gives the memory back.
pub struct MediaLease {
    memory: Arc<MediaMemory>,
    share: Share,
    bytes: usize,
    held: Option<Held>,
}

impl MediaMemory {
    /// Creates memory of `limit` bytes.
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, held: Mutex::default() })
    }

    /// Begins the lease of a caller's request, which holds nothing yet.
    pub fn lease(self: &Arc<Self>, share: Share) -> MediaLease {
        MediaLease { memory: self.clone(), share, bytes: 0, held: None }
    }
}

impl Memory for MediaLease {
    fn take(&mut self, bytes: usize) -> bool {
        let total = self.bytes.saturating_add(bytes);
        let (limit, amount) = (self.memory.limit, total as u64);
        // A larger amount would count as this one.
        if amount > for_large(limit) {
            return false;
        }
        let mut all = self.memory.held.lock();
        let changed = match self.held.take() {
            Some(held) => all.change(limit, held, amount),
            None => match all.enter(limit, self.share, amount) {
                Some(held) => Ok(held),
                None => return false,
            },
        };
        let is_taken = changed.is_ok();
        if is_taken {
            self.bytes = total;
        }
        self.held = Some(changed.unwrap_or_else(|before| before));
        is_taken
    }

    fn give(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_sub(bytes);
        let mut all = self.memory.held.lock();
        if let Some(held) = self.held.take() {
            self.held = Some(all.replace(self.memory.limit, held, self.bytes as u64));
        }
    }
}

impl Drop for MediaLease {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            self.memory.held.lock().leave(held);
        }
    }
}

impl MediaLease {
    /// Names an item that has no canonical form.
    pub(super) fn refused(&self, path: &str, error: MediaError) -> Error {
        match error {
            MediaError::NoMemory(bytes)
                if self.bytes.saturating_add(bytes) as u64 <= for_large(self.memory.limit) =>
            {
                let message = format!("{path} {error}: the limit for all media is {}", self.memory.limit);
                Error::overloaded(message, RETRY_AFTER)
            }
            error => Error::invalid(path, error.to_string()),
        }
    }
}
