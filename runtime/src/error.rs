//! The type of every error that a client may see, with the mapping to gRPC and HTTP.

use std::{fmt, time::Duration};

use http::StatusCode;
use tonic::{Code, Status, metadata::MetadataValue};
use tutti_proto::cluster::v1 as pb;

/// gRPC metadata keys for the parts of an error that a status code cannot express.
const KIND: &str = "tutti-error-kind";
const FIELD: &str = "tutti-error-field";
const RETRY_AFTER: &str = "retry-after";

/// HTTP status of a request whose client leaves before the answer, as in nginx.
pub const CLIENT_LEFT: u16 = 499;

/// Maximum length of an error's message in bytes. A message may quote a value of the request, of any length.
const MAX_MESSAGE_BYTES: usize = 2048;
/// Bytes kept from the end of a message that is too long. The end often names the limit.
const MESSAGE_END_BYTES: usize = 512;
/// Maximum length of a field's name in bytes. The name of an unknown field comes from the request and can be longer.
const MAX_FIELD_BYTES: usize = 256;

/// The kind of an error, from the caller's point of view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request is invalid. A retry of the same request fails too.
    InvalidArgument,
    /// No such model, route or file.
    NotFound,
    /// The request's body exceeds the limit.
    TooLarge,
    /// A limit that all callers share is reached: a queue or a pool is full. A later retry may succeed.
    Overloaded,
    /// No process can accept the request now.
    Unavailable,
    /// The deadline passed or cannot be met.
    DeadlineExceeded,
    /// The client disconnected or cancelled the request.
    Cancelled,
    /// Tutti has no such operation.
    Unsupported,
    /// A fault of Tutti's own.
    Internal,
    /// The request has no valid API key.
    Unauthenticated,
    /// The caller may not send this request.
    Forbidden,
    /// A limit of the caller's own is reached, such as its requests per minute. A later retry may succeed.
    RateLimited,
    /// The request's body arrives too slowly.
    TooSlow,
}

impl ErrorKind {
    /// Every kind with its codes: gRPC, HTTP, OpenAI's `type`, and the kind on the wire.
    const TABLE: [(Self, Code, StatusCode, &'static str, pb::ErrorKind); 13] = {
        use pb::ErrorKind as Wire;
        const GONE: StatusCode = match StatusCode::from_u16(CLIENT_LEFT) {
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
                StatusCode::SERVICE_UNAVAILABLE,
                "server_error",
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
            (
                Self::Unauthenticated,
                Code::Unauthenticated,
                StatusCode::UNAUTHORIZED,
                "invalid_request_error",
                Wire::Unauthenticated,
            ),
            (
                Self::Forbidden,
                Code::PermissionDenied,
                StatusCode::FORBIDDEN,
                "invalid_request_error",
                Wire::Forbidden,
            ),
            // `RateLimited` and `TooSlow` share codes with other kinds. The kind in the metadata distinguishes them.
            (
                Self::RateLimited,
                Code::ResourceExhausted,
                StatusCode::TOO_MANY_REQUESTS,
                "rate_limit_error",
                Wire::RateLimited,
            ),
            (
                Self::TooSlow,
                Code::DeadlineExceeded,
                StatusCode::REQUEST_TIMEOUT,
                "invalid_request_error",
                Wire::TooSlow,
            ),
        ]
    };

    fn row(self) -> &'static (Self, Code, StatusCode, &'static str, pb::ErrorKind) {
        // The table has one entry for every kind, in the order of the enum; a test checks this.
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

    /// The kind as a label value of metrics.
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
            Self::Unauthenticated => "unauthenticated",
            Self::Forbidden => "forbidden",
            Self::RateLimited => "rate_limited",
            Self::TooSlow => "too_slow",
        }
    }

    /// The label values of all kinds.
    pub fn labels() -> impl Iterator<Item = &'static str> {
        Self::TABLE.iter().map(|row| row.0.label())
    }

    fn from_wire(wire: pb::ErrorKind) -> Self {
        Self::TABLE.iter().find(|row| row.4 == wire).map_or(Self::Internal, |row| row.0)
    }

    fn from_grpc(code: Code) -> Self {
        Self::TABLE.iter().find(|row| row.1 == code).map_or(Self::Internal, |row| row.0)
    }
}

/// An error that a client may see: a kind, a message that names value and limit, and the request field at fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    field: Option<String>,
    retry_after: Option<Duration>,
}

impl Error {
    /// An error of this kind. By convention the message is lowercase and names the values. The middle of a message over
    /// 2 KiB is left out.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let message = shorten(message.into(), MAX_MESSAGE_BYTES, MESSAGE_END_BYTES, " … ");
        Self { kind, message, field: None, retry_after: None }
    }

    /// An invalid request field. `field` is spelt as in the client's request.
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message).with_field(field)
    }

    /// A fault of Tutti's own. The message is for the operator, and clients see it too.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// No process can accept the request now. The client may retry after a second.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self { retry_after: Some(Duration::from_secs(1)), ..Self::new(ErrorKind::Unavailable, message) }
    }

    /// A limit that all callers share is reached. The client may retry after `retry_after`.
    pub fn overloaded(message: impl Into<String>, retry_after: Duration) -> Self {
        Self { retry_after: Some(retry_after), ..Self::new(ErrorKind::Overloaded, message) }
    }

    /// A limit of the caller's own is reached. The client may retry after `retry_after`.
    pub fn rate_limited(message: impl Into<String>, retry_after: Duration) -> Self {
        Self { retry_after: Some(retry_after), ..Self::new(ErrorKind::RateLimited, message) }
    }

    /// Sets the field at fault. The middle of a name over 256 bytes is left out.
    #[must_use]
    pub fn with_field(mut self, field: impl Into<String>) -> Self {
        // In ASCII, because metadata of gRPC is.
        self.field = Some(shorten(field.into(), MAX_FIELD_BYTES, MAX_FIELD_BYTES / 4, " ... "));
        self
    }

    /// True if a Tutti process made this status from an `Error`. Any other status comes from the transport: a broken
    /// connection, a proxy, or the gRPC library.
    pub fn is_carried_by(status: &Status) -> bool {
        status.metadata().contains_key(KIND)
    }

    /// The error's kind.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The message, without the field.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The request field at fault, spelt as in the client's request.
    pub fn field(&self) -> Option<&str> {
        self.field.as_deref()
    }

    /// Time after which the client may retry.
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }
}

/// Leaves out the middle of a text that is longer than `limit` bytes, and writes `left_out` there. Keeps about `end`
/// bytes of the text's end.
fn shorten(text: String, limit: usize, end: usize, left_out: &str) -> String {
    if text.len() <= limit {
        return text;
    }
    let head = text.floor_char_boundary(limit - end - left_out.len());
    let tail = text.ceil_char_boundary(text.len() - end);
    [&text[..head], left_out, &text[tail..]].concat()
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

impl Error {
    /// The error as a status with the code UNAUTHENTICATED, for a caller that has not authenticated.
    pub fn into_unauthenticated(self) -> Status {
        let status = Status::from(self);
        Status::with_metadata(Code::Unauthenticated, status.message(), status.metadata().clone())
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

impl From<tutti_proto::parameters::Refused> for Error {
    fn from(refused: tutti_proto::parameters::Refused) -> Self {
        Self::invalid(refused.parameter, refused.message)
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
mod tests;
