//! The server metrics of OpenTelemetry's semantic conventions for generative AI, in addition to the router's own
//! metrics. The exemplars are trace ids of sampled requests.

use std::time::{Duration, SystemTime};

use prometheus_client::encoding::EncodeLabelSet;
use tutti_runtime::{
    declare_metrics,
    metrics::{
        Unit,
        metrics::{exemplar::HistogramWithExemplars, family::Family},
    },
    trace::TraceContext,
};

/// The value of `gen_ai.provider.name`.
pub const PROVIDER: &str = "tutti";

/// Bucket bounds that the conventions advise for `gen_ai.server.request.duration`, in seconds.
const DURATION: [f64; 14] =
    [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92];
/// Bucket bounds that the conventions advise for `gen_ai.server.time_to_first_token`, in seconds.
const FIRST_TOKEN: [f64; 16] =
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];
/// Bucket bounds that the conventions advise for `gen_ai.server.time_per_output_token`, in seconds, and three lower
/// bounds.
const PER_TOKEN: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Operation {
    gen_ai_operation_name: &'static str,
    gen_ai_provider_name: &'static str,
    gen_ai_request_model: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct EndedOperation {
    gen_ai_operation_name: &'static str,
    gen_ai_provider_name: &'static str,
    gen_ai_request_model: String,
    /// Empty for a request without an error: Prometheus treats an empty label as absent.
    error_type: &'static str,
}

/// Labels of an exemplar.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TraceLabels {
    trace_id: String,
    span_id: String,
}

type Histograms<L> =
    Family<L, HistogramWithExemplars<TraceLabels>, fn() -> HistogramWithExemplars<TraceLabels>>;

declare_metrics! {
    /// The histograms. Clones share them.
    #[derive(Clone)]
    pub struct GenAiMetrics {
        duration: Histograms<EndedOperation> =
            Histograms::new_with_constructor(|| HistogramWithExemplars::new(DURATION.into_iter())),
            "gen_ai_server_request_duration" in Unit::Seconds,
            "Seconds from a request's arrival to its end (gen_ai.server.request.duration)";
        first_token: Histograms<Operation> =
            Histograms::new_with_constructor(|| HistogramWithExemplars::new(FIRST_TOKEN.into_iter())),
            "gen_ai_server_time_to_first_token" in Unit::Seconds,
            "Seconds from a request's arrival to its first token (gen_ai.server.time_to_first_token)";
        per_token: Histograms<Operation> =
            Histograms::new_with_constructor(|| HistogramWithExemplars::new(PER_TOKEN.into_iter())),
            "gen_ai_server_time_per_output_token" in Unit::Seconds,
            "Mean seconds per output token after the first (gen_ai.server.time_per_output_token)";
    }
}

/// The times of one request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// Time from the request's arrival to its end.
    pub whole: Duration,
    /// Time from the request's arrival to its first token; `None` without a token.
    pub first_token: Option<Duration>,
    /// Mean time per output token after the first one of each choice; `None` without such tokens.
    pub per_token: Option<Duration>,
}

impl GenAiMetrics {
    /// Records a request that has ended. `model` is the name of the served model, never a client's text.
    pub fn ended(
        &self,
        operation: &'static str,
        model: &str,
        times: Times,
        error_type: &'static str,
        trace: Option<&TraceContext>,
    ) {
        let ended = EndedOperation {
            gen_ai_operation_name: operation,
            gen_ai_provider_name: PROVIDER,
            gen_ai_request_model: model.to_owned(),
            error_type,
        };
        let labels = Operation {
            gen_ai_operation_name: operation,
            gen_ai_provider_name: PROVIDER,
            gen_ai_request_model: model.to_owned(),
        };
        let observe = |histogram: &HistogramWithExemplars<TraceLabels>, time: Duration| {
            let exemplar =
                trace.map(|trace| TraceLabels { trace_id: trace.trace_id(), span_id: trace.span_id() });
            histogram.observe(time.as_secs_f64(), exemplar, trace.map(|_| SystemTime::now()));
        };
        observe(&self.duration.get_or_create(&ended), times.whole);
        if let Some(time) = times.first_token {
            observe(&self.first_token.get_or_create(&labels), time);
        }
        if let Some(time) = times.per_token {
            observe(&self.per_token.get_or_create(&labels), time);
        }
    }
}
