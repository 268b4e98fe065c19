//! Metrics of requests, from their acceptance to their end.

use tutti_runtime::{
    ErrorKind, declare_metrics,
    metrics::{
        Registry,
        encoding::EncodeLabelSet,
        metrics::{counter::Counter, family::Family, gauge::Gauge},
    },
};

use super::{ConductorMetrics, ReasonLabel};
use crate::request::{Dropped, EndingKind};

/// Outcomes of requests.
const OUTCOMES: [&str; 6] =
    ["finished", "cancelled", "deadline_exceeded", "worker_lost", "failed", "refused"];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

declare_metrics! {
    #[derive(Debug)]
    pub(super) struct RequestMetrics {
        requests: Family<OutcomeLabel, Counter>, "requests", "Requests that have ended, by outcome";
        in_flight: Gauge, "requests_in_flight", "Requests accepted and not yet completed by every worker";
        refusals: Family<ReasonLabel, Counter>, "requests_refused",
            "Requests refused by the conductor's validation or a worker's admission, by reason";
        prompt_tokens: Counter, "prompt_tokens", "Prompt tokens of accepted requests";
        generated_tokens: Counter, "generated_tokens", "Tokens generated for requests";
        completions_dropped: Family<ReasonLabel, Counter>, "completions_dropped",
            "Completions that matched no pending worker graph, by reason";
        tokens_dropped: Counter, "tokens_dropped",
            "Tokens dropped because they were of an earlier try, received before, or late after an ending";
        replays: Counter, "request_replays", "Tries of requests that were lost with their worker and repeated";
        moved: Counter, "requests_moved",
            "Requests that waited at a worker and moved to another one before they began";
        handovers: Counter, "request_handovers",
            "Requests whose prefill was handed over to another worker for the decode";
    }
}

impl RequestMetrics {
    /// Registers the metrics. Counters that alerts watch begin at 0, because Prometheus does not see the first sample
    /// of a new series as an increase.
    pub fn begin(registry: &mut Registry) -> Self {
        let own = Self::register(registry);
        for outcome in OUTCOMES {
            own.requests.get_or_create(&OutcomeLabel { outcome }).inc_by(0);
        }
        for reason in [Dropped::Stale, Dropped::Duplicate, Dropped::Unknown].map(drop_reason) {
            own.completions_dropped.get_or_create(&ReasonLabel { reason }).inc_by(0);
        }
        for reason in ErrorKind::labels() {
            own.refusals.get_or_create(&ReasonLabel { reason }).inc_by(0);
        }
        own
    }
}

impl ConductorMetrics {
    pub(crate) fn accepted(&self, prompt_tokens: usize, in_flight: usize) {
        self.requests.prompt_tokens.inc_by(prompt_tokens as u64);
        self.in_flight(in_flight);
    }

    pub(crate) fn in_flight(&self, requests: usize) {
        self.requests.in_flight.set(requests as i64);
    }

    pub(crate) fn tokens(&self, taken: usize, dropped: usize) {
        self.requests.generated_tokens.inc_by(taken as u64);
        self.requests.tokens_dropped.inc_by(dropped as u64);
    }

    pub(crate) fn replayed(&self) {
        self.requests.replays.inc();
    }

    /// Number of replays since the start.
    pub(crate) fn replays(&self) -> u64 {
        self.requests.replays.get()
    }

    pub(crate) fn moved(&self) {
        self.requests.moved.inc();
    }

    pub(crate) fn handed_over(&self) {
        self.requests.handovers.inc();
    }

    pub(crate) fn ended(&self, kind: EndingKind) {
        let outcome = match kind {
            EndingKind::Refused(why) => return self.refused(why),
            EndingKind::Finished => "finished",
            EndingKind::Cancelled | EndingKind::Failed(ErrorKind::Cancelled) => "cancelled",
            EndingKind::Failed(ErrorKind::DeadlineExceeded) => "deadline_exceeded",
            EndingKind::Failed(ErrorKind::Unavailable) => "worker_lost",
            EndingKind::Failed(_) => "failed",
        };
        self.requests.requests.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    pub(crate) fn refused(&self, why: ErrorKind) {
        self.requests.requests.get_or_create(&OutcomeLabel { outcome: "refused" }).inc();
        self.requests.refusals.get_or_create(&ReasonLabel { reason: why.label() }).inc();
    }

    pub(crate) fn dropped(&self, why: Dropped) {
        self.requests.completions_dropped.get_or_create(&ReasonLabel { reason: drop_reason(why) }).inc();
    }
}

fn drop_reason(why: Dropped) -> &'static str {
    match why {
        Dropped::Stale => "stale",
        Dropped::Duplicate => "duplicate",
        Dropped::Unknown => "unknown",
    }
}
