//! Standing of a caller with a listener: unknown, until a service has checked the caller's credential.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use http::Extensions;

use super::activity::Activity;

/// Standing of the caller of one request. Every request carries it as an extension. What a listener shares among its
/// callers is kept from strangers in part: they cannot hold all of it.
#[derive(Clone, Debug)]
pub struct Standing {
    is_known: Arc<AtomicBool>,
    activity: Arc<Activity>,
}

impl Standing {
    /// The standing of a stranger.
    pub(super) fn of_stranger(activity: Arc<Activity>) -> Self {
        Self { is_known: Arc::default(), activity }
    }

    /// Notes that the caller of the request with these extensions has shown a valid credential, or needs none.
    pub fn vouch(extensions: &Extensions) {
        // A service that is called without a listener, as in tests, has no callers with a standing.
        let Some(standing) = extensions.get::<Self>() else { return };
        if !standing.is_known.swap(true, Relaxed) {
            standing.activity.caller_is_known();
        }
    }

    /// True once the caller is known.
    pub(super) fn is_known(&self) -> bool {
        self.is_known.load(Relaxed)
    }
}
