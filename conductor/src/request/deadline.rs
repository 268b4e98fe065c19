//! A request's deadline. The caller supplies the time.

use std::time::{Duration, Instant};

use tutti_runtime::{Error, ErrorKind};

/// The time at which a request fails if it has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline {
    /// The time at which the request fails.
    pub at: Instant,
    timeout_ms: u32,
}

impl Deadline {
    /// Creates the deadline `timeout_ms` milliseconds after `came`, the time of the request's arrival. A timeout of 0
    /// is an error.
    pub fn new(came: Instant, timeout_ms: u32) -> Result<Self, Error> {
        if timeout_ms == 0 {
            return Err(Error::new(ErrorKind::DeadlineExceeded, "no time is left for the request"));
        }
        Ok(Self { at: came + Duration::from_millis(timeout_ms.into()), timeout_ms })
    }

    /// Milliseconds left, rounded up: 0 only once the deadline has passed.
    pub fn left_ms(&self, now: Instant) -> u32 {
        let left = self.at.saturating_duration_since(now);
        u32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
    }

    /// The error that the client receives after the deadline.
    pub fn error(&self) -> Error {
        let message = format!("the request was not done within the {} ms that were left", self.timeout_ms);
        Error::new(ErrorKind::DeadlineExceeded, message)
    }
}

#[cfg(test)]
mod tests;
