//! Until when a request is worth something. The clock is the caller's.

use std::time::{Duration, Instant};

use tutti_runtime::{Error, ErrorKind};

/// The time that a client gave its request, from when the request came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline {
    /// When it is over.
    pub at: Instant,
    timeout_ms: u32,
}

impl Deadline {
    /// So many milliseconds after `came`. None at all is an error: nothing could be done in it.
    pub fn new(came: Instant, timeout_ms: u32) -> Result<Self, Error> {
        if timeout_ms == 0 {
            return Err(Error::new(ErrorKind::DeadlineExceeded, "no time is left for the request"));
        }
        Ok(Self { at: came + Duration::from_millis(timeout_ms.into()), timeout_ms })
    }

    /// Milliseconds left, rounded up so that a short time is not none; 0 only once it is over.
    pub fn left_ms(&self, now: Instant) -> u32 {
        let left = self.at.saturating_duration_since(now);
        u32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
    }

    /// What the client is told when it is over.
    pub fn error(&self) -> Error {
        let message = format!("the request was not done within the {} ms that were left", self.timeout_ms);
        Error::new(ErrorKind::DeadlineExceeded, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_shrinks_to_nothing_and_not_before() {
        let came = Instant::now();
        let deadline = Deadline::new(came, 30).unwrap();
        let left = |us| deadline.left_ms(came + Duration::from_micros(us));
        assert_eq!([left(0), left(10_000), left(29_999), left(30_000), left(90_000)], [30, 20, 1, 0, 0]);
    }

    #[test]
    fn no_time_is_no_deadline() {
        let error = Deadline::new(Instant::now(), 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    }
}
