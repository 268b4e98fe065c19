//! Metrics of the front door.

use std::time::Instant;

use prometheus_client::encoding::EncodeLabelSet;
use tracing::{Span, field::Empty};
use tutti_runtime::{
    Error, ErrorKind,
    metrics::{
        Metrics,
        metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    },
};

/// Histogram buckets in seconds, from the time per token of a fast engine to the duration of a long request.
const BUCKETS: [f64; 16] =
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
    /// The client disconnected.
    Cancelled,
}

impl Outcome {
    /// The outcome for an error: `DeadlineExceeded` if the error says so, else `otherwise`.
    pub fn of(error: &Error, otherwise: Self) -> Self {
        if error.kind() == ErrorKind::DeadlineExceeded { Self::DeadlineExceeded } else { otherwise }
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

/// Metrics of the front door. Clones share the metrics.
#[derive(Clone)]
pub struct RouterMetrics {
    requests: Family<RouteStatus, Counter>,
    in_flight: Gauge,
    outcomes: Family<OutcomeLabel, Counter>,
    refusals: Family<ReasonLabel, Counter>,
    first_token: Histogram,
    between_tokens: Histogram,
    whole: Histogram,
    prompt_tokens: Counter,
    generated_tokens: Counter,
}

impl RouterMetrics {
    /// Registers the metrics.
    pub fn register(metrics: &Metrics) -> Self {
        let own = Self {
            requests: Family::default(),
            in_flight: Gauge::default(),
            outcomes: Family::default(),
            refusals: Family::default(),
            first_token: Histogram::new(BUCKETS),
            between_tokens: Histogram::new(BUCKETS),
            whole: Histogram::new(BUCKETS),
            prompt_tokens: Counter::default(),
            generated_tokens: Counter::default(),
        };
        metrics.register(|registry| {
            let router = registry.sub_registry_with_prefix("router");
            let help = "Requests answered, by route and status (HTTP status or gRPC code)";
            router.register("requests", help, own.requests.clone());
            let help = "Generations now running";
            router.register("requests_in_flight", help, own.in_flight.clone());
            router.register("generations", "Generations ended, by outcome", own.outcomes.clone());
            let help = "Generations refused by the router or by a conductor, by reason";
            router.register("generations_refused", help, own.refusals.clone());
            let help = "Seconds from a request's arrival to its first token";
            router.register("time_to_first_token_seconds", help, own.first_token.clone());
            let help = "Seconds between two consecutive deliveries of a choice's tokens";
            router.register("inter_token_latency_seconds", help, own.between_tokens.clone());
            let help = "Seconds from a generation's arrival to its end, for every outcome";
            router.register("request_seconds", help, own.whole.clone());
            let help = "Prompt tokens of accepted requests";
            router.register("prompt_tokens", help, own.prompt_tokens.clone());
            let help = "Tokens received from conductors";
            router.register("generated_tokens", help, own.generated_tokens.clone());
        });
        own
    }

    /// Counts an answer. Routes and statuses come from fixed sets, never from a client's text.
    pub fn answered(&self, route: &str, status: &str) {
        let labels = RouteStatus { route: route.to_owned(), status: status.to_owned() };
        self.requests.get_or_create(&labels).inc();
    }
}

/// Measures one generation. Dropping the meter records the generation's end, so that every kind of end is counted.
pub struct RequestMeter {
    metrics: RouterMetrics,
    span: Span,
    arrived: Instant,
    /// For each choice, by index: the time of the last delivery of tokens.
    last: Vec<Option<Instant>>,
    /// True once any choice has got a token.
    any: bool,
    outcome: Outcome,
}

impl RequestMeter {
    /// Starts measuring a generation that arrives now.
    pub fn start(metrics: &RouterMetrics) -> Self {
        metrics.in_flight.inc();
        let span = tracing::info_span!("generation", prompt_tokens = Empty, outcome = Empty);
        // If `ends` is never called, the generation was dropped because its client disconnected, so this is the
        // outcome.
        let outcome = Outcome::Cancelled;
        Self {
            metrics: metrics.clone(),
            span,
            arrived: Instant::now(),
            last: Vec::new(),
            any: false,
            outcome,
        }
    }

    /// The generation's tracing span, from arrival to end.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// Records that the request was accepted with this many tokens in its prompts.
    pub fn accepted(&self, prompt_tokens: u32) {
        self.metrics.prompt_tokens.inc_by(u64::from(prompt_tokens));
        self.span.record("prompt_tokens", prompt_tokens);
    }

    /// Records that the request was not accepted.
    pub fn refused(&mut self, error: &Error) {
        self.ends(Outcome::of(error, Outcome::Refused));
        self.metrics.refusals.get_or_create(&ReasonLabel { reason: error.kind().label() }).inc();
    }

    /// Sets the outcome.
    pub fn ends(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }

    /// Records a choice's delta with this many tokens.
    pub fn delta(&mut self, choice: u32, tokens: usize, now: Instant) {
        if tokens == 0 {
            return;
        }
        self.metrics.generated_tokens.inc_by(tokens as u64);
        if !std::mem::replace(&mut self.any, true) {
            self.metrics.first_token.observe((now - self.arrived).as_secs_f64());
        }
        let index = choice as usize;
        if self.last.len() <= index {
            self.last.resize(index + 1, None);
        }
        if let Some(last) = self.last[index].replace(now) {
            self.metrics.between_tokens.observe((now - last).as_secs_f64());
        }
    }
}

impl Drop for RequestMeter {
    fn drop(&mut self) {
        self.metrics.in_flight.dec();
        self.metrics.whole.observe(self.arrived.elapsed().as_secs_f64());
        self.metrics.outcomes.get_or_create(&OutcomeLabel { outcome: self.outcome.name() }).inc();
        self.span.record("outcome", self.outcome.name());
        if self.outcome == Outcome::Cancelled {
            self.span.in_scope(|| tracing::info!(status = 499, "the client left"));
        }
    }
}
