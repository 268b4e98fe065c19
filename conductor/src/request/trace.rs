//! The spans of one request in the conductor. No other module of `request` reads the clock. This module reads it only
//! if the request's trace is sampled.

use std::time::SystemTime;

use tracing::{Span, field};
use tutti_proto::{GraphKey, RequestId, cluster::v1 as pb};
use tutti_runtime::{
    request_id::XRequestId,
    trace::{self, KeyValue, SpanKind, TraceContext, TraceSpan},
};

use super::{GraphRole, Members, Origin};
use crate::mailbox::Ending;

/// A request's span in logs, and its spans in a sampled trace. The log span lasts from the request's acceptance until
/// no worker holds data of the request.
#[derive(Debug)]
pub(super) struct RequestTrace {
    log: Span,
    request_id: Option<XRequestId>,
    /// Context of the request's trace; `None` if the trace is not sampled.
    trace: Option<TraceContext>,
    /// The span of the wait for a placement.
    queue: Option<TraceSpan>,
}

impl RequestTrace {
    /// Begins the spans of a request that was just accepted, with the router's span and the client's id.
    pub fn begin(id: RequestId, prompt_tokens: usize, origin: Origin) -> Self {
        let Origin { trace: router, request_id, .. } = origin;
        let name = request_id.as_ref().map(XRequestId::as_str);
        // The level lets the span name the request in lines of any level, whatever the log filter says.
        let (log, trace) = match router {
            None => {
                let (id, ending) = (id.0, field::Empty);
                let log = tracing::error_span!("request", id, request_id = name, prompt_tokens, ending);
                (log, None)
            }
            Some(router) => {
                let log = tracing::error_span!(
                    "request",
                    otel.kind = "server",
                    trace_id = field::Empty,
                    id = id.0,
                    request_id = name,
                    prompt_tokens,
                    ending = field::Empty
                );
                let trace = router.continue_in(&log);
                (log, trace)
            }
        };
        let mut spans = Self { log, request_id, trace, queue: None };
        spans.waits();
        spans
    }

    /// The id by which the client and all logs name the request; empty if there is none.
    pub fn request_id(&self) -> &str {
        self.request_id.as_ref().map_or("", XRequestId::as_str)
    }

    /// The context for a worker's spans.
    pub fn to_message(&self) -> Option<pb::TraceContext> {
        self.trace.as_ref().map(TraceContext::to_message)
    }

    /// Runs `log` inside the span, so that its lines belong to the request.
    pub fn in_scope(&self, log: impl FnOnce()) {
        self.log.in_scope(log);
    }

    /// Records that the request waits for a placement.
    pub fn waits(&mut self) {
        self.queue =
            self.trace.as_ref().map(|trace| trace.child("queue", SpanKind::Internal, SystemTime::now()));
    }

    /// Records that the request waits no longer.
    pub fn placed(&mut self) {
        self.queue = None;
    }

    /// Records that a graph was sent to its ranks.
    pub fn launched(&self, key: GraphKey, role: GraphRole, members: &Members) {
        if self.trace.is_none() {
            return;
        }
        let leader = members.keys().next().map_or(-1, |rank| i64::from(rank.0));
        self.event(
            "launched",
            vec![
                KeyValue::new("tutti.graph.role", role.name()),
                KeyValue::new("tutti.incarnation", i64::from(key.incarnation.0)),
                KeyValue::new("tutti.worker.rank", leader),
            ],
        );
    }

    /// Records that planes or embeddings have been handed over.
    pub fn handed_over(&self, what: &'static str) {
        if self.trace.is_some() {
            self.event("handed_over", vec![KeyValue::new("tutti.transfer.of", what)]);
        }
    }

    fn event(&self, name: &'static str, attributes: Vec<KeyValue>) {
        trace::event(&self.log, name, attributes);
    }

    /// Records the request's ending.
    pub fn ended(&mut self, ending: &Ending) {
        self.log.record("ending", field::debug(ending));
        self.queue = None;
        if self.trace.is_none() {
            return;
        }
        match ending {
            Ending::Finished(_) => {}
            Ending::Cancelled => trace::fail(&self.log, "cancelled", "cancelled by the router"),
            Ending::Failed(error) | Ending::Refused(error) => {
                trace::fail(&self.log, error.kind().label(), error.message().to_owned());
            }
        }
    }
}
