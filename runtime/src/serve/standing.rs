//! The standing of a caller at a listener. A caller is unknown until a service has checked its credential.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use http::Extensions;

use super::activity::Activity;

/// The standing of one request's caller. Every request carries it as an extension. Unknown callers can take only a part
/// of what a listener's callers share.
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

    /// Records that the caller of the request with these extensions has shown a valid credential, or needs none.
    pub fn vouch(extensions: &Extensions) {
        // A request without a listener, as in tests, has no standing.
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
