//! Metrics of the front door.

mod gen_ai;
mod latency;
mod span;
mod totals;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use prometheus_client::encoding::EncodeLabelSet;
use tracing::Span;
use tutti_runtime::{
    CLIENT_LEFT, Error, ErrorKind,
    command_line::processes::ROUTER,
    declare_metrics,
    metrics::{
        Metrics,
        metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    },
    request_id::XRequestId,
    trace::{ClientSpan, TraceContext},
};

pub use self::totals::Totals;
use self::{
    gen_ai::{GenAiMetrics, Times},
    latency::LatencyHistogram,
    span::RequestSpan,
};
use crate::{
    access::{GenerationEnd, RequestRecord},
    generation::{CallCounts, Finish, GenerationRequest, Prompt, Usage},
    served::ServedModel,
};

/// Histogram buckets in seconds, from the time per token of a fast engine to the duration of a long request.
pub const LATENCY_BOUNDS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RouteStatus {
    route: String,
    status: String,
}

/// The outcome of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All choices finished.
    Finished,
    /// The request was not accepted.
    Refused,
    /// The request was accepted and then failed.
    Failed,
    /// The request's deadline passed, or could not be met.
    DeadlineExceeded,
    /// The client disconnected, or an operator cancelled the request.
    Cancelled,
}

impl Outcome {
    const ALL: [Self; 5] =
        [Self::Finished, Self::Refused, Self::Failed, Self::DeadlineExceeded, Self::Cancelled];

    /// The outcome for an error: `DeadlineExceeded` or `Cancelled` if the error says so, else `otherwise`.
    pub fn of(error: &Error, otherwise: Self) -> Self {
        match error.kind() {
            ErrorKind::DeadlineExceeded => Self::DeadlineExceeded,
            ErrorKind::Cancelled => Self::Cancelled,
            _ => otherwise,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Cancelled => "cancelled",
        }
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct DeclaredLabel {
    declared: &'static str,
}

declare_metrics! {
    #[derive(Clone)]
    struct OwnMetrics {
        requests: Family<RouteStatus, Counter>, "requests",
            "Requests answered, by route and status (HTTP status or gRPC code)";
        in_flight: Gauge, "requests_in_flight", "Generations now running";
        outcomes: Family<OutcomeLabel, Counter>, "generations", "Generations ended, by outcome";
        choices: Family<ReasonLabel, Counter>, "choices_finished",
            "Choices that have finished, by the reason that clients see: stop, length, tool_calls";
        tool_calls: Family<DeclaredLabel, Counter>, "tool_calls",
            "Tool calls of choices that have finished, by whether the request declares the tool: yes, no";
        refusals: Family<ReasonLabel, Counter>, "generations_refused",
            "Generations refused by the router or by a conductor, by reason";
        first_token: LatencyHistogram = LatencyHistogram::new(&LATENCY_BOUNDS), "time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token";
        between_tokens: LatencyHistogram = LatencyHistogram::new(&LATENCY_BOUNDS), "inter_token_latency_seconds",
            "Seconds between two consecutive deliveries of a choice's tokens";
        whole: Histogram = Histogram::new(LATENCY_BOUNDS), "request_seconds",
            "Seconds from a generation's arrival to its end, for every outcome";
        prompt_tokens: Counter, "prompt_tokens", "Prompt tokens of accepted requests";
        generated_tokens: Counter, "generated_tokens", "Tokens received from conductors";
    }
}

impl OwnMetrics {
    fn count_calls(&self, calls: CallCounts) {
        for (declared, calls) in [("yes", calls.all - calls.undeclared), ("no", calls.undeclared)] {
            self.tool_calls.get_or_create(&DeclaredLabel { declared }).inc_by(calls.into());
        }
    }
}

/// Metrics of the front door. Clones share the metrics.
#[derive(Clone)]
pub struct RouterMetrics {
    own: OwnMetrics,
    gen_ai: GenAiMetrics,
}

impl RouterMetrics {
    /// Registers the metrics.
    pub fn register(metrics: &Metrics) -> Self {
        let own = metrics.register_of(ROUTER.name, OwnMetrics::register);
        // Creates every series with the value 0. Prometheus sees no increase in the first sample of a new series.
        for outcome in Outcome::ALL {
            own.outcomes.get_or_create(&OutcomeLabel { outcome: outcome.name() }).inc_by(0);
        }
        for reason in Finish::WORDS {
            own.choices.get_or_create(&ReasonLabel { reason }).inc_by(0);
        }
        own.count_calls(CallCounts::default());
        for reason in ErrorKind::labels() {
            own.refusals.get_or_create(&ReasonLabel { reason }).inc_by(0);
        }
        Self { own, gen_ai: metrics.register_conventional(GenAiMetrics::register) }
    }

    /// Counts an answer. Routes and statuses come from fixed sets, never from a client's text.
    pub fn answered(&self, route: &str, status: &str) {
        let labels = RouteStatus { route: route.to_owned(), status: status.to_owned() };
        self.own.requests.get_or_create(&labels).inc();
    }
}

/// A request's name in logs, in its trace and at conductors.
#[derive(Clone)]
pub struct RequestName {
    /// The id by which the client and all processes name the request.
    pub id: XRequestId,
    /// The span of the request's log lines.
    pub log: Span,
    /// The request's span, if its trace is sampled.
    pub trace: Option<TraceContext>,
}

/// Measures one generation. Dropping the meter records the generation's end, so that every kind of end is counted.
pub struct RequestMeter {
    metrics: RouterMetrics,
    span: RequestSpan,
    record: RequestRecord,
    /// Name of the operation in OpenTelemetry's conventions: `chat` or `text_completion`.
    operation: &'static str,
    /// `None` if the served model is not known yet.
    model: Option<Arc<ServedModel>>,
    arrived: Instant,
    /// For each choice, by index: the time of the last delivery of tokens.
    last: Vec<Option<Instant>>,
    /// Times of the first and the last delivery of tokens of any choice.
    first_and_latest: Option<(Instant, Instant)>,
    /// Number of tokens delivered.
    tokens: u64,
    /// Token counts of the prompts and, once all choices have finished, of the output.
    usage: Usage,
    outcome: Outcome,
    /// The kind of the error that ended the generation.
    error: Option<ErrorKind>,
}

impl RequestMeter {
    /// Starts measuring a generation that arrives now. `client` is the client's own trace span, if its headers name
    /// one.
    pub fn start(
        metrics: &RouterMetrics,
        client: Option<ClientSpan>,
        record: RequestRecord,
        request: &GenerationRequest,
        model: Option<Arc<ServedModel>>,
    ) -> Self {
        metrics.own.in_flight.inc();
        let span = RequestSpan::begin(client);
        let is_chat = matches!(request.prompts.first(), Some(Prompt::Chat { .. }));
        let operation = if is_chat { "chat" } else { "text_completion" };
        span.describe(operation, name(model.as_deref()), request);
        span.name(record.id());
        // The outcome if no other outcome is recorded: the generation is dropped because its client disconnects.
        let outcome = Outcome::Cancelled;
        Self {
            metrics: metrics.clone(),
            span,
            record,
            operation,
            model,
            arrived: Instant::now(),
            last: Vec::new(),
            first_and_latest: None,
            tokens: 0,
            usage: Usage::default(),
            outcome,
            error: None,
        }
    }

    /// The generation's tracing span, from arrival to end.
    pub fn span(&self) -> &Span {
        self.span.log()
    }

    /// The generation's name.
    pub fn name(&self) -> RequestName {
        let (log, trace) = (self.span.log().clone(), self.span.trace().cloned());
        RequestName { id: self.record.id().clone(), log, trace }
    }

    /// Records that the request was accepted with this many tokens in its prompts.
    pub fn accepted(&mut self, prompt_tokens: u32) {
        self.usage.prompt_tokens = prompt_tokens;
        self.metrics.own.prompt_tokens.inc_by(u64::from(prompt_tokens));
        self.span.log().record("prompt_tokens", prompt_tokens);
    }

    /// Records that the request was not accepted.
    pub fn refused(&mut self, error: &Error) {
        self.fails(error, Outcome::Refused);
        self.metrics.own.refusals.get_or_create(&ReasonLabel { reason: error.kind().label() }).inc();
    }

    /// Records that the request ends with an error. The outcome is `DeadlineExceeded` if the error says so, else
    /// `otherwise`.
    pub fn fails(&mut self, error: &Error, otherwise: Outcome) {
        self.outcome = Outcome::of(error, otherwise);
        self.error = Some(error.kind());
        self.span.failed(error);
    }

    /// Records that a choice has ended. `reason` is the word of OpenAI's `finish_reason`.
    pub fn choice_ended(&mut self, reason: &'static str, calls: CallCounts) {
        self.metrics.own.choices.get_or_create(&ReasonLabel { reason }).inc();
        self.metrics.own.count_calls(calls);
        self.span.choice_ended(reason);
    }

    /// Records that all choices have finished.
    pub fn finished(&mut self, usage: Usage) {
        self.outcome = Outcome::Finished;
        self.usage = usage;
        self.span.used(usage);
    }

    /// Records a choice's delta with this many tokens.
    pub fn delta(&mut self, choice: u32, tokens: usize, now: Instant) {
        if tokens == 0 {
            return;
        }
        self.metrics.own.generated_tokens.inc_by(tokens as u64);
        self.tokens += tokens as u64;
        match &mut self.first_and_latest {
            Some((_, latest)) => *latest = now,
            none => {
                *none = Some((now, now));
                self.metrics.own.first_token.observe(now - self.arrived);
                self.span.first_token();
            }
        }
        let index = choice as usize;
        if self.last.len() <= index {
            self.last.resize(index + 1, None);
        }
        if let Some(last) = self.last[index].replace(now) {
            self.metrics.own.between_tokens.observe(now - last);
        }
    }

    /// Times for the metrics of OpenTelemetry's conventions.
    fn times(&self, whole: Duration) -> Times {
        let Some((first, latest)) = self.first_and_latest else { return Times { whole, ..Times::default() } };
        let choices = self.last.iter().flatten().count() as u64;
        let later_tokens = self.tokens.saturating_sub(choices);
        let per_token =
            (later_tokens > 0).then(|| (latest - first).mul_f64(choices as f64 / later_tokens as f64));
        Times { whole, first_token: Some(first - self.arrived), per_token }
    }
}

/// The name of the served model; empty if it is not known yet.
fn name(model: Option<&ServedModel>) -> &str {
    model.map_or("", |model| &model.description.served_name)
}

impl Drop for RequestMeter {
    fn drop(&mut self) {
        self.metrics.own.in_flight.dec();
        let whole = self.arrived.elapsed();
        self.metrics.own.whole.observe(whole.as_secs_f64());
        self.metrics.own.outcomes.get_or_create(&OutcomeLabel { outcome: self.outcome.name() }).inc();
        let error = match (self.outcome, self.error) {
            (Outcome::Finished, _) => "",
            (_, Some(kind)) => kind.label(),
            (outcome, None) => outcome.name(),
        };
        let (times, model) = (self.times(whole), name(self.model.as_deref()));
        self.metrics.gen_ai.ended(self.operation, model, times, error, self.span.trace());
        self.record.generation_ended(GenerationEnd {
            outcome: self.outcome.name(),
            error: self.error.map(ErrorKind::label),
            first_token: self.first_and_latest.map(|(first, _)| self.record.until(first)),
            usage: Usage { completion_tokens: u32::try_from(self.tokens).unwrap_or(u32::MAX), ..self.usage },
        });
        self.span.end(self.outcome);
        if self.outcome == Outcome::Cancelled && self.error.is_none() {
            self.span.log().in_scope(|| tracing::debug!(status = CLIENT_LEFT, "the client left"));
        }
    }
}
