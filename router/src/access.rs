//! The id of each request, and its line in the log once it has ended: the access log.
//!
//! A record of the request is made when the request arrives. The parts of the program that work on the request share
//! the record, and note facts in it. When the last of them drops it, nobody works on the request any more, and the line
//! is written: after the last byte of a stream, or when the client has left.

mod body;
mod limiter;

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use axum::http::{Extensions, HeaderMap, Method};
use parking_lot::Mutex;
use tutti_runtime::{CLIENT_LEFT, live::Live, request_id::XRequestId, serve::Peer};
use tutti_settings::{AccessLog as Setting, RouterSettings};

pub use self::body::RecordedBody;
use self::limiter::Limiter;
use crate::{generation::Usage, keys::Caller};

/// Longest method in a line. A client may send methods that do not exist, of any length.
const MAX_METHOD_BYTES: usize = 16;
/// The target of the lines, for filters such as `warn,tutti_router::access=info`.
const TARGET: &str = "tutti_router::access";
/// The route, in lines and in metrics, of a request for which there is none.
pub const NO_ROUTE: &str = "unknown";

/// The access log of a front door. Clones share it.
#[derive(Clone)]
pub struct AccessLog(Arc<Shared>);

struct Shared {
    settings: Live<RouterSettings>,
    limiter: Limiter,
}

/// The record of one request. Clones share it.
#[derive(Clone)]
pub struct RequestRecord(Arc<Record>);

struct Record {
    log: AccessLog,
    id: XRequestId,
    arrived: Instant,
    method: Option<Method>,
    peer: Option<Peer>,
    caller: OnceLock<Caller>,
    facts: Mutex<Facts>,
}

/// The facts of a request that its line in the log has.
#[derive(Default)]
struct Facts {
    route: Option<Arc<str>>,
    status: Option<Status>,
    /// Kind of the error of an answer that is an error.
    error: Option<&'static str>,
    answer: Option<AnswerEnd>,
    generation: Option<GenerationEnd>,
}

/// The status of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// A status of HTTP.
    Http(u16),
    /// A code of gRPC.
    Grpc(tonic::Code),
}

impl Status {
    fn is_success(self) -> bool {
        match self {
            Self::Http(status) => status < 400,
            Self::Grpc(code) => code == tonic::Code::Ok,
        }
    }

    /// True if the request ends because its key is not accepted.
    fn is_unauthenticated(self) -> bool {
        matches!(self, Self::Http(401) | Self::Grpc(tonic::Code::Unauthenticated))
    }

    /// True if the request met a fault of Tutti.
    fn is_fault(self) -> bool {
        use tonic::Code::{Internal, Unknown};
        matches!(self, Self::Http(500) | Self::Grpc(Internal | Unknown))
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http(status) => status.fmt(f),
            Self::Grpc(code) => write!(f, "{code:?}"),
        }
    }
}

/// The end of an answer's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerEnd {
    /// Bytes of the body that its connection has taken.
    pub bytes: u64,
    /// False if the client left before the end.
    pub is_whole: bool,
}

/// The end of a request's generation.
#[derive(Clone, Copy, Debug)]
pub struct GenerationEnd {
    /// The outcome, in the words of the metrics.
    pub outcome: &'static str,
    /// Kind of the error that ended it.
    pub error: Option<&'static str>,
    /// Time from the request's arrival to the first token.
    pub first_token: Option<Duration>,
    /// Token counts. `completion_tokens` is the number of tokens received so far if the generation did not finish.
    pub usage: Usage,
}

impl AccessLog {
    /// Creates the log.
    pub fn new(settings: Live<RouterSettings>) -> Self {
        Self(Arc::new(Shared { settings, limiter: Limiter::default() }))
    }

    /// Begins the record of a request that arrives now. Takes the id from the client's headers, or makes one. `method`
    /// is `None` for a call over gRPC.
    pub fn begin(
        &self,
        method: Option<Method>,
        headers: &HeaderMap,
        extensions: &Extensions,
    ) -> RequestRecord {
        let id = XRequestId::of(headers).unwrap_or_else(|| XRequestId::random(fastrand::u128(..)));
        RequestRecord(Arc::new(Record {
            log: self.clone(),
            id,
            arrived: Instant::now(),
            method,
            peer: extensions.get().copied(),
            caller: OnceLock::new(),
            facts: Mutex::default(),
        }))
    }
}

impl RequestRecord {
    /// The record that a request's extensions have. Without one, as in tests, the facts of the returned record are
    /// written nowhere.
    pub fn of(extensions: &Extensions) -> Self {
        extensions.get::<Self>().cloned().unwrap_or_else(|| {
            let settings = RouterSettings { access_log: Setting::Off, ..RouterSettings::default() };
            AccessLog::new(settings.into()).begin(None, &HeaderMap::new(), extensions)
        })
    }

    /// True if the answer has no body, whatever the route gives.
    fn is_head(&self) -> bool {
        self.0.method == Some(Method::HEAD)
    }

    /// The request's id.
    pub fn id(&self) -> &XRequestId {
        &self.0.id
    }

    /// Time from the request's arrival to `then`.
    pub fn until(&self, then: Instant) -> Duration {
        then.saturating_duration_since(self.0.arrived)
    }

    /// A span that names the request in all lines that are logged inside it. Its level lets it do so in lines of any
    /// level, whatever the log filter says.
    pub fn span(&self) -> tracing::Span {
        tracing::error_span!("call", request_id = self.id().as_str())
    }

    /// Notes the route.
    pub fn set_route(&self, route: impl Into<Arc<str>>) {
        self.0.facts.lock().route = Some(route.into());
    }

    /// Notes the caller. The first one counts.
    pub fn set_caller(&self, caller: &Caller) {
        let _ = self.0.caller.set(caller.clone());
    }

    /// Notes the status, and for an error its kind.
    pub fn answered(&self, status: Status, error: Option<&'static str>) {
        let mut facts = self.0.facts.lock();
        facts.status = Some(status);
        facts.error = error.or(facts.error);
    }

    /// Notes the code with which a call over gRPC ends.
    fn ended_with(&self, code: tonic::Code) {
        self.0.facts.lock().status = Some(Status::Grpc(code));
    }

    /// Notes the end of the answer's body.
    fn answer_ended(&self, end: AnswerEnd) {
        self.0.facts.lock().answer = Some(end);
    }

    /// Notes the end of the request's generation.
    pub fn generation_ended(&self, end: GenerationEnd) {
        self.0.facts.lock().generation = Some(end);
    }
}

impl Facts {
    /// The status, whether the request succeeded, and its outcome in a word. `unanswered` is the status of a request
    /// whose client left before the answer.
    fn outcome(&self, unanswered: Status) -> (Status, bool, &'static str) {
        let status = self.status.unwrap_or(unanswered);
        let left = self.status.is_none() || self.answer.is_some_and(|answer| !answer.is_whole);
        let word = match &self.generation {
            // A fault of ours may come before the generation is accepted.
            Some(end) if end.outcome == "refused" && status.is_fault() => "failed",
            // A revoked key ends a request with an error, although its client is still there.
            Some(end) if end.outcome == "cancelled" && status.is_unauthenticated() => "refused",
            Some(end) if end.outcome != "finished" => end.outcome,
            // The generation may have finished before its client has read the answer.
            _ if left => "cancelled",
            _ if status.is_fault() => "failed",
            _ if !status.is_success() => "refused",
            _ => "finished",
        };
        (status, word == "finished", word)
    }
}

/// The method as a line has it.
fn short(method: &Method) -> &str {
    if method.as_str().len() <= MAX_METHOD_BYTES { method.as_str() } else { "unknown" }
}

impl Drop for Record {
    fn drop(&mut self) {
        let setting = self.log.0.settings.get().access_log;
        let facts = self.facts.get_mut();
        let unanswered = match self.method {
            Some(_) => Status::Http(CLIENT_LEFT),
            None => Status::Grpc(tonic::Code::Cancelled),
        };
        let (status, is_success, outcome) = facts.outcome(unanswered);
        if setting == Setting::Off || (setting == Setting::Errors && is_success) {
            return;
        }
        // Clients cause all ends but success, and may cause them by the thousand.
        let more =
            if is_success { Some(0) } else { self.log.0.limiter.count(status, outcome, Instant::now()) };
        let Some(more) = more else { return };
        let (http_status, code) = match status {
            Status::Http(status) => (Some(status), None),
            Status::Grpc(code) => (None, Some(tracing::field::debug(code))),
        };
        let generation = facts.generation.as_ref();
        let ms = |time: Duration| time.as_micros() as f64 / 1e3;
        tracing::info!(
            target: TARGET,
            parent: None,
            request_id = self.id.as_str(),
            method = self.method.as_ref().map(short),
            route = facts.route.as_deref().unwrap_or(NO_ROUTE),
            status = http_status,
            code,
            outcome,
            error = generation.and_then(|end| end.error).or(facts.error),
            key = self.caller.get().and_then(Caller::name),
            peer = self.peer.map(tracing::field::display),
            duration_ms = ms(self.arrived.elapsed()),
            first_token_ms = generation.and_then(|end| end.first_token).map(ms),
            prompt_tokens = generation.map(|end| end.usage.prompt_tokens),
            cached_tokens = generation.map(|end| end.usage.cached_tokens),
            output_tokens = generation.map(|end| end.usage.completion_tokens),
            answer_bytes = facts.answer.map(|end| end.bytes),
            more = Some(more).filter(|more| *more > 0),
            "request"
        );
    }
}

#[cfg(test)]
mod tests;
