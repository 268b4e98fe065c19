//! The span of one request in the router, with the attributes of OpenTelemetry's semantic conventions for generative
//! AI.

use tracing::{Span, field::Empty};
use tutti_proto::v1::constraint::Kind;
use tutti_runtime::{
    Error,
    request_id::XRequestId,
    trace::{self, ClientSpan, TraceContext, Value, words},
};

use super::{Outcome, gen_ai::PROVIDER};
use crate::generation::{GenerationRequest, Usage};

/// A request's span in logs and, if its trace is sampled, in the trace.
pub struct RequestSpan {
    log: Span,
    /// `None` if the trace is not sampled.
    trace: Option<TraceContext>,
    finish_reasons: Vec<&'static str>,
}

impl RequestSpan {
    /// Begins the span of a request that arrives now. `client` is the client's own trace span, if its headers name one.
    pub fn begin(client: Option<ClientSpan>) -> Self {
        if !trace::is_on() {
            let log = tracing::error_span!("generation", prompt_tokens = Empty, outcome = Empty);
            return Self { log, trace: None, finish_reasons: Vec::new() };
        }
        // The level lets the span name the trace in lines of any level, whatever the log filter says.
        let log = tracing::error_span!(
            "generation",
            otel.kind = "server",
            trace_id = Empty,
            prompt_tokens = Empty,
            outcome = Empty
        );
        let trace = TraceContext::begin(&log, client);
        Self { log, trace, finish_reasons: Vec::new() }
    }

    /// The span in logs.
    pub fn log(&self) -> &Span {
        &self.log
    }

    /// The span's context, if the trace is sampled.
    pub fn trace(&self) -> Option<&TraceContext> {
        self.trace.as_ref()
    }

    fn set(&self, key: &'static str, value: impl Into<Value>) {
        trace::set(&self.log, key, value);
    }

    /// Names the request in the trace.
    pub fn name(&self, id: &XRequestId) {
        if self.trace.is_some() {
            self.set("tutti.request_id", id.as_str().to_owned());
        }
    }

    /// Describes the request for the trace. `model` is the served model's name; it is empty if no model is known yet.
    pub fn describe(&self, operation: &'static str, model: &str, request: &GenerationRequest) {
        if self.trace.is_none() {
            return;
        }
        trace::rename(&self.log, format!("{operation} {model}"));
        self.set("gen_ai.operation.name", operation);
        self.set("gen_ai.provider.name", PROVIDER);
        self.set("gen_ai.request.model", request.model.clone().unwrap_or_else(|| model.to_owned()));
        self.set("gen_ai.response.model", model.to_owned());
        self.set("gen_ai.output.type", if is_json(request) { "json" } else { "text" });
        self.set("gen_ai.request.choice.count", i64::from(request.n.unwrap_or(1)));
        let (sampling, stopping) = (&request.sampling, &request.stopping);
        let number = |key, value: Option<f32>| {
            if let Some(value) = value {
                self.set(key, f64::from(value));
            }
        };
        number("gen_ai.request.temperature", sampling.temperature);
        number("gen_ai.request.top_p", sampling.top_p);
        number("gen_ai.request.presence_penalty", sampling.presence_penalty);
        number("gen_ai.request.frequency_penalty", sampling.frequency_penalty);
        if let Some(top_k) = sampling.top_k {
            self.set("gen_ai.request.top_k", i64::from(top_k));
        }
        if let Some(seed) = sampling.seed {
            self.set("gen_ai.request.seed", seed as i64);
        }
        if let Some(max_tokens) = stopping.max_tokens.or(stopping.default_max_tokens) {
            self.set("gen_ai.request.max_tokens", i64::from(max_tokens));
        }
        if !stopping.stop.is_empty() {
            self.set("gen_ai.request.stop_sequences", words(stopping.stop.clone()));
        }
    }

    /// Records that the first token has arrived.
    pub fn first_token(&self) {
        if self.trace.is_some() {
            trace::event(&self.log, "first_token", Vec::new());
        }
    }

    /// Records that a choice has ended.
    pub fn choice_ended(&mut self, reason: &'static str) {
        if self.trace.is_some() {
            self.finish_reasons.push(reason);
        }
    }

    /// Records the request's token counts.
    pub fn used(&self, usage: Usage) {
        if self.trace.is_none() {
            return;
        }
        self.set("gen_ai.usage.input_tokens", i64::from(usage.prompt_tokens));
        self.set("gen_ai.usage.output_tokens", i64::from(usage.completion_tokens));
        self.set("gen_ai.usage.cache_read.input_tokens", i64::from(usage.cached_tokens));
    }

    /// Records why the request failed.
    pub fn failed(&self, error: &Error) {
        if self.trace.is_some() {
            trace::fail(&self.log, error.kind().label(), error.message().to_owned());
        }
    }

    /// Records the outcome, at the end.
    pub fn end(&mut self, outcome: Outcome) {
        self.log.record("outcome", outcome.name());
        if !self.finish_reasons.is_empty() {
            let reasons = std::mem::take(&mut self.finish_reasons);
            self.set("gen_ai.response.finish_reasons", words(reasons));
        }
        if self.trace.is_some() && outcome == Outcome::Cancelled {
            trace::fail(&self.log, outcome.name(), "the client left");
        }
        if self.trace.is_some() {
            // The end time of a span is the time of its last exit. This span was exited when its request was accepted,
            // so it is entered and exited once more.
            self.log.in_scope(|| ());
        }
    }
}

/// True if a request's constraint makes its answers JSON.
fn is_json(request: &GenerationRequest) -> bool {
    let kind = request.constraint.as_ref().and_then(|constraint| constraint.kind.as_ref());
    matches!(kind, Some(Kind::JsonObject(_) | Kind::JsonSchema(_)))
}
