//! Limits on the connections of a listener. Some of the limits change while the listener is served.

use tutti_settings::ConnectionSettings;

use crate::live::Live;

/// Limits on the connections of a listener. Clones share the settings.
#[derive(Clone, Debug, Default)]
pub struct ConnectionLimits {
    settings: Live<ConnectionSettings>,
    max_streams: Option<u32>,
    are_callers_trusted: bool,
    do_age: bool,
}

impl From<Live<ConnectionSettings>> for ConnectionLimits {
    fn from(settings: Live<ConnectionSettings>) -> Self {
        Self { settings, ..Self::default() }
    }
}

impl From<ConnectionSettings> for ConnectionLimits {
    fn from(settings: ConnectionSettings) -> Self {
        Live::new(settings).into()
    }
}

impl ConnectionLimits {
    /// Returns the limits with at most `max_streams` requests in progress on one HTTP/2 connection, whatever the
    /// settings say.
    #[must_use]
    pub fn with_streams(self, max_streams: u32) -> Self {
        Self { max_streams: Some(max_streams), ..self }
    }

    /// Returns the limits without a bound on the messages of callers with a credential. For listeners at which only
    /// processes of the cluster have a credential.
    #[must_use]
    pub fn trusting_callers(self) -> Self {
        Self { are_callers_trusted: true, ..self }
    }

    /// Returns the limits with a maximum age of connections, for listeners of clients. Connections inside a cluster do
    /// not age, because the gRPC client fails a call that it was about to send when a connection ends.
    #[must_use]
    pub fn aging(self) -> Self {
        Self { do_age: true, ..self }
    }

    pub(super) fn do_age(&self) -> bool {
        self.do_age
    }

    pub(super) fn are_callers_trusted(&self) -> bool {
        self.are_callers_trusted
    }

    pub(super) fn live(&self) -> Live<ConnectionSettings> {
        self.settings.clone()
    }

    pub(super) fn max_streams(&self) -> u32 {
        self.max_streams.unwrap_or_else(|| self.settings.get().max_streams)
    }
}
