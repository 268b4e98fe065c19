//! Traces of requests: one trace from the client's span to the steps of workers.
//!
//! A router decides once per request whether its trace is sampled, by the client's `traceparent` and by the sampler
//! that `OTEL_TRACES_SAMPLER` names. Only the context of a sampled request is sent to conductors and workers, as a
//! field of messages that are sent in any case. A process that receives no context records nothing. An unsampled
//! request therefore costs one comparison when it is launched.

mod export;

use std::{borrow::Cow, sync::OnceLock, time::SystemTime};

use http::HeaderMap;
use opentelemetry::{Array, StringValue};
use opentelemetry::{
    Context, SpanId, TraceId,
    propagation::{Extractor, TextMapPropagator},
    trace::{Span as _, SpanContext, Status, TraceContextExt, TraceFlags, TraceState, Tracer as _},
};
pub use opentelemetry::{KeyValue, Value, trace::SpanKind};
use opentelemetry_sdk::{
    propagation::TraceContextPropagator,
    trace::{SdkTracer, Span},
};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tutti_proto::cluster::v1 as pb;

pub use export::Sampling;
pub(crate) use export::SpanExport;

/// The field of a log span that contains the trace's id. Log spans that declare it become spans of the trace.
pub const TRACE_ID: &str = "trace_id";
/// Maximum length of a `tracestate` that is passed on, in bytes. W3C Trace Context asks for at least 512.
const MAX_TRACESTATE_BYTES: usize = 512;

static TRACER: OnceLock<SdkTracer> = OnceLock::new();

/// Sets the tracer of this process. Later calls have no effect.
pub(crate) fn set_tracer(tracer: SdkTracer) {
    let _ = TRACER.set(tracer);
}

/// True if spans of this process are exported.
pub fn is_on() -> bool {
    TRACER.get().is_some()
}

/// A client's span, as named by the W3C headers `traceparent` and `tracestate`.
#[derive(Clone, Debug)]
pub struct ClientSpan(Context);

impl ClientSpan {
    /// Reads the headers of a request, or the metadata of a gRPC call. `None` without a valid `traceparent`, or if this
    /// process exports no spans.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        if !is_on() || !headers.contains_key("traceparent") {
            return None;
        }
        let context = TraceContextPropagator::new().extract_with_context(&Context::new(), &Headers(headers));
        context.has_active_span().then_some(Self(context))
    }
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        let value = self.0.get(key)?.to_str().ok()?;
        (key != "tracestate" || value.len() <= MAX_TRACESTATE_BYTES).then_some(value)
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(|name| name.as_str()).collect()
    }
}

/// A span of a sampled trace. It is the parent of further spans, in this process or in another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext(SpanContext);

impl TraceContext {
    /// Makes a log span that declares the field [`TRACE_ID`] a span of the client's trace, or of a new one. Records the
    /// trace's id in the log span, and returns the span's context if the trace is sampled. The span must not have been
    /// entered.
    pub fn begin(span: &tracing::Span, client: Option<ClientSpan>) -> Option<Self> {
        if !is_on() {
            return None;
        }
        Self::begin_under(span, client.map(|client| client.0))
    }

    /// Makes a log span that declares the field [`TRACE_ID`] a child of this span.
    pub fn continue_in(&self, span: &tracing::Span) -> Option<Self> {
        Self::begin_under(span, Some(Context::new().with_remote_span_context(self.0.clone())))
    }

    fn begin_under(span: &tracing::Span, parent: Option<Context>) -> Option<Self> {
        // The error is ignored. It means that no layer records the span, whose context is then invalid.
        let _ = span.set_parent(parent.unwrap_or_default());
        let context = span.context();
        let own = context.span().span_context().clone();
        if own.is_valid() {
            span.record(TRACE_ID, tracing::field::display(own.trace_id()));
        }
        own.is_sampled().then_some(Self(own))
    }

    /// Reads the context of a message. `None` if the message has none, or if this process exports no spans.
    pub fn received(message: Option<pb::TraceContext>) -> Option<Self> {
        let pb::TraceContext { trace_id, span_id, tracestate } = message.filter(|_| is_on())?;
        let trace_id = TraceId::from_bytes(trace_id.try_into().ok()?);
        let state = tracestate.parse().unwrap_or(TraceState::NONE);
        let span_id = SpanId::from_bytes(span_id.to_be_bytes());
        let context = SpanContext::new(trace_id, span_id, TraceFlags::SAMPLED, true, state);
        context.is_valid().then_some(Self(context))
    }

    /// The context as a message's field.
    pub fn to_message(&self) -> pb::TraceContext {
        pb::TraceContext {
            trace_id: self.0.trace_id().to_bytes().to_vec(),
            span_id: u64::from_be_bytes(self.0.span_id().to_bytes()),
            tracestate: self.0.trace_state().header(),
        }
    }

    /// The trace's id, as 32 hexadecimal digits.
    pub fn trace_id(&self) -> String {
        self.0.trace_id().to_string()
    }

    /// The span's id, as 16 hexadecimal digits.
    pub fn span_id(&self) -> String {
        self.0.span_id().to_string()
    }

    /// Begins a child of this span.
    pub fn child(&self, name: &'static str, kind: SpanKind, began: SystemTime) -> TraceSpan {
        let parent = Context::new().with_remote_span_context(self.0.clone());
        TraceSpan(TRACER.get().map(|tracer| {
            tracer
                .span_builder(name)
                .with_kind(kind)
                .with_start_time(began)
                .start_with_context(tracer, &parent)
        }))
    }
}

/// A span that this process records. Dropping the span ends it.
#[derive(Debug)]
pub struct TraceSpan(Option<Span>);

impl TraceSpan {
    /// Begins a new trace, to which other spans link.
    pub fn root(name: &'static str, began: SystemTime) -> Self {
        Self(TRACER.get().map(|tracer| {
            tracer.span_builder(name).with_start_time(began).start_with_context(tracer, &Context::new())
        }))
    }

    /// The span's context, for children and links. `None` if the span is not sampled.
    pub fn context(&self) -> Option<TraceContext> {
        let context = self.0.as_ref()?.span_context();
        context.is_sampled().then(|| TraceContext(context.clone()))
    }

    /// Sets an attribute.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        if let Some(span) = &mut self.0 {
            span.set_attribute(KeyValue::new(key, value));
        }
    }

    /// Adds an event that happened at a time.
    pub fn event(&mut self, name: &'static str, at: SystemTime, attributes: Vec<KeyValue>) {
        if let Some(span) = &mut self.0 {
            span.add_event_with_timestamp(name, at, attributes);
        }
    }

    /// Links the span to another one.
    pub fn link(&mut self, to: &TraceContext) {
        if let Some(span) = &mut self.0 {
            span.add_link(to.0.clone(), Vec::new());
        }
    }

    /// Marks the span as failed.
    pub fn fail(&mut self, why: impl Into<Cow<'static, str>>) {
        if let Some(span) = &mut self.0 {
            span.set_status(Status::error(why));
        }
    }

    /// Ends the span at a time.
    pub fn end_at(mut self, at: SystemTime) {
        if let Some(span) = &mut self.0 {
            span.end_with_timestamp(at);
        }
    }
}

/// Marks a log span that is a part of a trace as failed. `kind` is one of a fixed set of words.
pub fn fail(span: &tracing::Span, kind: &'static str, why: impl Into<Cow<'static, str>>) {
    span.set_attribute("error.type", kind);
    span.set_status(Status::error(why));
}

/// Renames a log span that is a part of a trace. The span's name in logs does not change.
pub fn rename(span: &tracing::Span, name: String) {
    span.context().span().update_name(name);
}

/// Sets an attribute of a log span that is a part of a trace.
pub fn set(span: &tracing::Span, key: &'static str, value: impl Into<Value>) {
    span.set_attribute(key, value);
}

/// Adds an event at the current time to a log span that is a part of a trace.
pub fn event(span: &tracing::Span, name: &'static str, attributes: Vec<KeyValue>) {
    span.add_event(name, attributes);
}

/// A list of strings as an attribute's value.
pub fn words<W: Into<Cow<'static, str>>>(words: impl IntoIterator<Item = W>) -> Value {
    let words = words.into_iter().map(|word| StringValue::from(word.into()));
    Value::Array(Array::String(words.collect()))
}

#[cfg(test)]
mod tests;
