//! Settings that may change while the process runs.

use std::sync::Arc;

use parking_lot::RwLock;
use tutti_settings::{ConnectionSettings, DrainSettings, LiveGroups, RouterSettings};

/// A value that may be replaced while others use it. Clones share it.
#[derive(Debug, Default)]
pub struct Live<T>(Arc<RwLock<Arc<T>>>);

impl<T> Clone for Live<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> From<T> for Live<T> {
    fn from(value: T) -> Self {
        Self::new(value)
    }
}

impl<T> Live<T> {
    /// Wraps a value. Clones of the returned `Live` share it.
    pub fn new(value: T) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(value))))
    }

    /// The current value. The returned value does not change.
    pub fn get(&self) -> Arc<T> {
        self.0.read().clone()
    }

    fn set(&self, value: T) {
        *self.0.write() = Arc::new(value);
    }
}

/// The groups of settings in which some settings change live. The other settings in these groups keep their values from
/// the start of the process. Clones share the values.
#[derive(Clone, Debug)]
pub struct LiveSettings {
    /// Draining of requests before the process ends.
    pub drain: Live<DrainSettings>,
    /// Connections of each listener.
    pub connections: Live<ConnectionSettings>,
    /// The router's limits, API keys and tokenizer threads.
    pub router: Live<RouterSettings>,
}

impl LiveSettings {
    /// The groups of these settings.
    pub fn of(settings: &impl LiveGroups) -> Self {
        Self {
            drain: Live::new(settings.drain().clone()),
            connections: Live::new(settings.connections().clone()),
            router: Live::new(settings.router().clone()),
        }
    }

    /// Replaces all groups by the groups of `settings`.
    pub(crate) fn replace(&self, settings: &impl LiveGroups) {
        self.drain.set(settings.drain().clone());
        self.connections.set(settings.connections().clone());
        self.router.set(settings.router().clone());
    }
}
