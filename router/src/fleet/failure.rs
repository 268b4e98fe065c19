//! What a failed call to a conductor means: for its breaker, and for the request.

use tonic::{Code, Status};
use tutti_runtime::{Error, ErrorKind};

use super::breaker::Verdict;

/// Why a try of a request came to nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    error: Error,
    /// The way to the conductor broke; otherwise the conductor said so itself.
    transport: bool,
}

impl Failure {
    /// The way to the conductor broke.
    pub fn transport(message: impl Into<String>) -> Self {
        Self { error: Error::unavailable(message), transport: true }
    }

    /// What the client is told if nothing better comes of it.
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// See [`Failure::error`].
    pub fn into_error(self) -> Error {
        self.error
    }

    /// Whether the way to the conductor broke.
    pub fn is_transport(&self) -> bool {
        self.transport
    }

    /// Whether another conductor may do better. A request that a conductor answered with an error of its own would most
    /// likely bring down the next one too.
    pub fn may_go_elsewhere(&self) -> bool {
        self.transport || matches!(self.error.kind(), ErrorKind::Unavailable | ErrorKind::Overloaded)
    }

    /// What it says of the conductor.
    pub fn verdict(&self) -> Verdict {
        match self.error.kind() {
            _ if self.transport => Verdict::Fault,
            ErrorKind::Unavailable | ErrorKind::Internal => Verdict::Fault,
            _ => Verdict::None,
        }
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let made_here = !Error::is_told_by(&status);
        // Codes that gRPC itself makes of a broken connection, a stream that stops, or a proxy's own trouble.
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
