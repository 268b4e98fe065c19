//! One error for everything that a client may be told, and the one place that maps it to gRPC and HTTP.

use std::{fmt, time::Duration};

use http::StatusCode;
use tonic::{Code, Status, metadata::MetadataValue};
use tutti_proto::cluster::v1 as pb;

/// Metadata keys that carry across gRPC what a status code alone cannot.
const KIND: &str = "tutti-error-kind";
const FIELD: &str = "tutti-error-field";
const RETRY_AFTER: &str = "retry-after";

/// What went wrong, as far as the one who asked is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request cannot be honoured as it stands; sending it again will not help.
    InvalidArgument,
    /// No such model, route or file.
    NotFound,
    /// The request's body is over the limit.
    TooLarge,
    /// A bound was reached; later may be better.
    Overloaded,
    /// Nobody can take the request now.
    Unavailable,
    /// The deadline passed or cannot be met.
    DeadlineExceeded,
    /// The client went away or took it back.
    Cancelled,
    /// Tutti has no such operation.
    Unsupported,
    /// Our fault.
    Internal,
}

impl ErrorKind {
    /// Every kind with the codes it maps to: gRPC, HTTP, and OpenAI's `type`.
    const TABLE: [(Self, Code, StatusCode, &'static str, pb::ErrorKind); 9] = {
        use pb::ErrorKind as Wire;
        const GONE: StatusCode = match StatusCode::from_u16(499) {
            Ok(code) => code,
            Err(_) => StatusCode::BAD_REQUEST,
        };
        [
            (
                Self::InvalidArgument,
                Code::InvalidArgument,
                StatusCode::BAD_REQUEST,
                "invalid_request_error",
                Wire::InvalidArgument,
            ),
            (Self::NotFound, Code::NotFound, StatusCode::NOT_FOUND, "invalid_request_error", Wire::NotFound),
            (
                Self::TooLarge,
                Code::OutOfRange,
                StatusCode::PAYLOAD_TOO_LARGE,
                "invalid_request_error",
                Wire::TooLarge,
            ),
            (
                Self::Overloaded,
                Code::ResourceExhausted,
                StatusCode::TOO_MANY_REQUESTS,
                "rate_limit_error",
                Wire::Overloaded,
            ),
            (
                Self::Unavailable,
                Code::Unavailable,
                StatusCode::SERVICE_UNAVAILABLE,
                "server_error",
                Wire::Unavailable,
            ),
            (
                Self::DeadlineExceeded,
                Code::DeadlineExceeded,
                StatusCode::GATEWAY_TIMEOUT,
                "server_error",
                Wire::DeadlineExceeded,
            ),
            (Self::Cancelled, Code::Cancelled, GONE, "server_error", Wire::Cancelled),
            (
                Self::Unsupported,
                Code::Unimplemented,
                StatusCode::NOT_IMPLEMENTED,
                "invalid_request_error",
                Wire::Unsupported,
            ),
            (
                Self::Internal,
                Code::Internal,
                StatusCode::INTERNAL_SERVER_ERROR,
                "server_error",
                Wire::Internal,
            ),
        ]
    };

    fn row(self) -> &'static (Self, Code, StatusCode, &'static str, pb::ErrorKind) {
        // The table has a row for every kind, in declaration order; the test below holds it to that.
        &Self::TABLE[self as usize]
    }

    /// The gRPC code.
    pub fn grpc(self) -> Code {
        self.row().1
    }

    /// The HTTP status.
    pub fn http(self) -> StatusCode {
        self.row().2
    }

    /// The `type` in OpenAI's error object.
    pub fn openai_type(self) -> &'static str {
        self.row().3
    }

    /// As a label of metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid",
            Self::NotFound => "not_found",
            Self::TooLarge => "too_large",
            Self::Overloaded => "overloaded",
            Self::Unavailable => "unavailable",
            Self::DeadlineExceeded => "deadline",
            Self::Cancelled => "cancelled",
            Self::Unsupported => "unsupported",
            Self::Internal => "internal",
        }
    }

    fn from_wire(wire: pb::ErrorKind) -> Self {
        Self::TABLE.iter().find(|row| row.4 == wire).map_or(Self::Internal, |row| row.0)
    }

    fn from_grpc(code: Code) -> Self {
        Self::TABLE.iter().find(|row| row.1 == code).map_or(Self::Internal, |row| row.0)
    }
}

/// An error a client may see: a kind, a message that names value and limit, and the request field at fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    field: Option<String>,
    retry_after: Option<Duration>,
}

impl Error {
    /// An error of this kind. The message is lowercase and concrete.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), field: None, retry_after: None }
    }

    /// A request field that cannot be honoured; `field` is spelt as the client spells it.
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: Some(field.into()), ..Self::new(ErrorKind::InvalidArgument, message) }
    }

    /// Our fault. The message says what the operator should know; clients are told no more than that.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// Nobody can take the request now.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self { retry_after: Some(Duration::from_secs(1)), ..Self::new(ErrorKind::Unavailable, message) }
    }

    /// A bound was reached; the client may come back after `retry_after`.
    pub fn overloaded(message: impl Into<String>, retry_after: Duration) -> Self {
        Self { retry_after: Some(retry_after), ..Self::new(ErrorKind::Overloaded, message) }
    }

    /// Names the field at fault.
    #[must_use]
    pub fn with_field(mut self, field: impl Into<String>) -> Self {
        self.field = Some(field.into());
        self
    }

    /// Whether a process of Tutti made this status, out of an error of its own. Any other comes from the way to it: a
    /// broken connection, a proxy, or the gRPC library.
    pub fn is_told_by(status: &Status) -> bool {
        status.metadata().contains_key(KIND)
    }

    /// What kind it is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What happened.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The request field at fault, spelt as the client spells it.
    pub fn field(&self) -> Option<&str> {
        self.field.as_deref()
    }

    /// When to come back.
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.field {
            Some(field) => write!(f, "{field}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for Error {}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let mut status = Self::new(error.kind.grpc(), error.message);
        let metadata = status.metadata_mut();
        metadata.insert(KIND, MetadataValue::from(error.kind.row().4 as i32));
        if let Some(field) = error.field.and_then(|f| MetadataValue::try_from(f).ok()) {
            metadata.insert(FIELD, field);
        }
        if let Some(after) = error.retry_after {
            metadata.insert(RETRY_AFTER, MetadataValue::from(after.as_secs().max(1)));
        }
        status
    }
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        let text = |key| status.metadata().get(key).and_then(|v| v.to_str().ok());
        let kind = text(KIND)
            .and_then(|v| v.parse().ok())
            .and_then(|v: i32| pb::ErrorKind::try_from(v).ok())
            .map_or_else(|| ErrorKind::from_grpc(status.code()), ErrorKind::from_wire);
        Self {
            kind,
            message: status.message().to_owned(),
            field: text(FIELD).map(str::to_owned),
            retry_after: text(RETRY_AFTER).and_then(|v| v.parse().ok()).map(Duration::from_secs),
        }
    }
}

impl From<tutti_settings::Invalid> for Error {
    fn from(refused: tutti_settings::Invalid) -> Self {
        Self::invalid(refused.field, refused.message)
    }
}

impl From<Error> for pb::Fault {
    fn from(error: Error) -> Self {
        Self {
            kind: error.kind.row().4.into(),
            message: error.message,
            field: error.field.unwrap_or_default(),
        }
    }
}

impl From<pb::Fault> for Error {
    fn from(fault: pb::Fault) -> Self {
        let kind = ErrorKind::from_wire(fault.kind());
        let error = Self::new(kind, fault.message);
        if fault.field.is_empty() { error } else { error.with_field(fault.field) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_its_own_row() {
        for (place, row) in ErrorKind::TABLE.iter().enumerate() {
            assert_eq!(row.0 as usize, place);
            assert_eq!(ErrorKind::from_wire(row.4), row.0);
            assert_eq!(ErrorKind::from_grpc(row.1), row.0);
        }
    }

    #[test]
    fn an_error_survives_a_grpc_status() {
        let sent = Error::overloaded("512 requests are in flight, the limit is 512", Duration::from_secs(3))
            .with_field("n");
        assert_eq!(Error::from(Status::from(sent.clone())), sent);
    }

    #[test]
    fn a_foreign_status_is_told_by_its_code() {
        let status = Status::unavailable("connection refused");
        assert!(!Error::is_told_by(&status) && Error::is_told_by(&Error::unavailable("draining").into()));
        let error = Error::from(status);
        assert_eq!((error.kind(), error.field()), (ErrorKind::Unavailable, None));
    }

    #[test]
    fn a_fault_keeps_kind_and_field() {
        let sent = Error::invalid("prompt", "is empty");
        assert_eq!(Error::from(pb::Fault::from(sent.clone())), sent);
    }
}
