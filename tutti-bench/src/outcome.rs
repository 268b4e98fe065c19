//! The outcome of one request.

use std::{fmt, time::Duration};

use crate::events::{EventError, Usage};

/// The answer to a request, or its failure. Times count from the moment of sending.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Time and number of tokens of each event with tokens.
    pub arrivals: Vec<(Duration, u32)>,
    /// Time of the end of the answer.
    pub end: Duration,
    /// The server's count of tokens.
    pub usage: Option<Usage>,
    /// Reason of a failure; `None` if the request was served.
    pub failure: Option<Failure>,
}

impl Outcome {
    /// Number of tokens of the answer: the server's count, or else the number that arrived.
    pub fn tokens(&self) -> u32 {
        let arrived = || self.arrivals.iter().map(|(_, tokens)| tokens).sum();
        self.usage.map_or_else(arrived, |usage| usage.completion_tokens)
    }

    /// Time from sending to the first token.
    pub fn first(&self) -> Option<Duration> {
        self.arrivals.first().map(|(at, _)| *at)
    }

    /// Mean time per token, without the tokens of the first event. `None` if no token came later.
    pub fn time_per_token(&self) -> Option<Duration> {
        let (first, _) = self.arrivals.first()?;
        let (last, _) = self.arrivals.last()?;
        let later: u32 = self.arrivals[1..].iter().map(|(_, tokens)| tokens).sum();
        (last > first && later > 0).then(|| (*last - *first) / later)
    }

    /// Checks a complete answer, and records a failure if it has no token or the wrong number of tokens. `exact` is the
    /// number of tokens that it must have, if that number is known.
    pub fn judge(&mut self, exact: Option<u32>) {
        if self.failure.is_some() {
            return;
        }
        let tokens = self.tokens();
        if tokens == 0 {
            self.failure = Some(Failure::new(FailureKind::Empty, "the stream ended without a token"));
        } else if let Some(exact) = exact.filter(|exact| *exact != tokens) {
            let why = format!("{tokens} tokens came, {exact} were asked for");
            self.failure = Some(Failure::new(FailureKind::Length, why));
        }
    }
}

/// The reason for which a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The kind. Failures are counted by kind.
    pub kind: FailureKind,
    /// The message, cut to [`Failure::MAX_MESSAGE`] bytes or less.
    pub message: String,
}

impl Failure {
    /// Maximum length of a message, in bytes.
    pub const MAX_MESSAGE: usize = 400;

    /// A failure with a message of any length.
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        let mut message = message.into();
        message.truncate(message.floor_char_boundary(Self::MAX_MESSAGE));
        Self { kind, message }
    }
}

impl From<EventError> for Failure {
    fn from(error: EventError) -> Self {
        let kind = match error {
            EventError::Server(_) => FailureKind::Stream,
            EventError::Malformed(_) => FailureKind::Malformed,
        };
        Self::new(kind, error.to_string())
    }
}

/// Kinds of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FailureKind {
    /// No connection could be made.
    Connect,
    /// The answer was not complete within the timeout.
    Timeout,
    /// The server answered with this HTTP status.
    Status(u16),
    /// The server ended the call with this gRPC code.
    Grpc(i32),
    /// The server reported an error inside the stream.
    Stream,
    /// The connection was lost before the answer was complete.
    Broken,
    /// The answer does not have the form of the API.
    Malformed,
    /// The answer has no token.
    Empty,
    /// The answer has fewer or more tokens than were asked for.
    Length,
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Status(status) => return write!(f, "status {status}"),
            Self::Grpc(code) => return write!(f, "grpc {:?}", tonic::Code::from_i32(*code)),
            Self::Connect => "connect",
            Self::Timeout => "timeout",
            Self::Stream => "error in the stream",
            Self::Broken => "connection lost",
            Self::Malformed => "malformed",
            Self::Empty => "no token",
            Self::Length => "number of tokens",
        })
    }
}
