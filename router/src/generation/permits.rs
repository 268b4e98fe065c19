//! Permits of choices in progress.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::{
    bound::{Bound, Held},
    keys::Share,
};

/// The permits of all choices.
pub struct Permits {
    limit: u32,
    bound: Mutex<Bound>,
}

/// The permits of a request's choices. Dropping the value releases them.
pub struct Permit {
    permits: Arc<Permits>,
    held: Option<Held>,
}

impl Permits {
    /// Creates permits for this many choices.
    pub fn new(limit: u32) -> Arc<Self> {
        Arc::new(Self { limit, bound: Mutex::default() })
    }

    /// Takes permits for a request's choices, all or none. On failure, returns the number of permits that all requests
    /// hold now.
    pub fn take(self: &Arc<Self>, share: Share, choices: u32) -> Result<Permit, u64> {
        let mut bound = self.bound.lock();
        match bound.enter(self.limit.into(), share, choices.into()) {
            Some(held) => Ok(Permit { permits: self.clone(), held: Some(held) }),
            None => Err(bound.held()),
        }
    }

    /// True if no choice is in progress.
    pub fn are_free(&self) -> bool {
        self.bound.lock().held() == 0
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            self.permits.bound.lock().leave(held);
        }
    }
}
