//! A failed call to a conductor, and its meaning for the breaker and for the request.

use tonic::{Code, Status};
use tutti_runtime::{Error, ErrorKind};

use super::breaker::Verdict;

/// The reason that an attempt at a request failed.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    error: Error,
    /// True if the connection broke; false if the conductor answered with the error.
    transport: bool,
}

impl Failure {
    /// A failure of the connection to the conductor.
    pub fn transport(message: impl Into<String>) -> Self {
        Self { error: Error::unavailable(message), transport: true }
    }

    /// The error that the client gets if no other attempt succeeds.
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// Returns the error; see [`Failure::error`].
    pub fn into_error(self) -> Error {
        self.error
    }

    /// True if the connection to the conductor broke.
    pub fn is_transport(&self) -> bool {
        self.transport
    }

    /// True if another conductor may succeed. An internal error of a conductor is final: the request would probably
    /// fail on the next conductor as well.
    pub fn may_go_elsewhere(&self) -> bool {
        self.transport || matches!(self.error.kind(), ErrorKind::Unavailable | ErrorKind::Overloaded)
    }

    /// True if the conductor refuses the request because of its load. The conductor works, so such a refusal uses up no
    /// retry and no replay.
    pub fn is_load(&self) -> bool {
        !self.transport && self.error.kind() == ErrorKind::Overloaded
    }

    /// The verdict for the conductor's circuit breaker.
    pub fn verdict(&self) -> Verdict {
        match self.error.kind() {
            _ if self.transport => Verdict::Fault,
            // It ended one request. The conductor serves all others.
            _ if self.error.field() == Some("constraint") => Verdict::None,
            ErrorKind::Unavailable | ErrorKind::Internal => Verdict::Fault,
            _ => Verdict::None,
        }
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let made_here = !Error::is_carried_by(&status);
        // gRPC's codes for a broken connection, an interrupted stream, or a failing proxy.
        let broken =
            matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Aborted);
        if made_here && broken {
            return Self::transport(status.message());
        }
        let transport = made_here && status.code() == Code::Internal;
        Self { error: status.into(), transport }
    }
}

#[cfg(test)]
mod tests;
