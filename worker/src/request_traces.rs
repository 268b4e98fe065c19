//! Spans of sampled requests on this worker: the wait for a step, the prefill with an event per chunk, the decode with
//! links to some of its steps, and the transfer to another worker.
//!
//! The engine's thread does not know of spans. The task that makes reports reads the times of each step, and only while
//! the worker has a graph of a sampled request.

use std::{
    collections::HashMap,
    time::{Duration, Instant, SystemTime},
};

use tutti_engine::{RowRecord, StepView};
use tutti_proto::{
    GraphKey, Rank,
    cluster::v1::{self as pb, completion::Outcome},
    declaration::{ModelDeclaration, WalkId, WalkKind},
};
use tutti_runtime::trace::{KeyValue, SpanKind, TraceContext, TraceSpan};

/// The sampled graphs of this worker.
pub(crate) struct RequestTraces {
    rank: Rank,
    graphs: HashMap<GraphKey, GraphTrace>,
}

/// Kind of a row's work. A graph's time is divided into spans by this kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Encode,
    Prefill,
    Decode,
}

impl Work {
    fn of(walk: WalkId, model: &ModelDeclaration) -> Self {
        match model.walk(walk).map(|walk| walk.kind) {
            Some(WalkKind::Decode { .. }) => Self::Decode,
            _ if model.encodes(walk) => Self::Encode,
            _ => Self::Prefill,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Encode => "encode",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// One graph of a sampled request.
struct GraphTrace {
    span: TraceSpan,
    context: TraceContext,
    /// The span of the wait for the first step, or for planes or embeddings of another worker.
    waiting: Option<TraceSpan>,
    work: Option<WorkSpan>,
    /// The name of the content that the graph hands over to another worker; `None` if it hands over nothing.
    sends: Option<&'static str>,
    /// The span of the transfer to another worker. The span begins with the first row that was computed for that
    /// worker.
    transfer: Option<TraceSpan>,
}

/// The span of consecutive rows with the same kind of work.
struct WorkSpan {
    work: Work,
    span: TraceSpan,
    rows: u64,
    /// Time at which the latest row was collected.
    latest: SystemTime,
}

impl WorkSpan {
    fn end(mut self) {
        self.span.set("tutti.rows", self.rows as i64);
        self.span.end_at(self.latest);
    }
}

impl RequestTraces {
    /// Creates the traces of a worker with this rank.
    pub fn new(rank: Rank) -> Self {
        Self { rank, graphs: HashMap::new() }
    }

    /// True if this worker has no graph of a sampled request.
    pub fn is_empty(&self) -> bool {
        self.graphs.is_empty()
    }

    /// Begins the spans of a graph that arrives now, if its request is sampled.
    pub fn launched(&mut self, graph: &pb::LaunchGraph, model: &ModelDeclaration) {
        let (Some(parent), Some(key)) = (TraceContext::received(graph.trace.clone()), graph.key) else {
            return;
        };
        let key = GraphKey::from(key);
        let encodes = graph.walks.iter().any(|walk| model.encodes(WalkId(*walk)));
        let (name, role) = match (&graph.receive, &graph.send_to) {
            _ if encodes => ("graph encode", "encode"),
            (Some(_), _) => ("graph decode", "decode"),
            (None, Some(_)) => ("graph prefill", "prefill"),
            (None, None) => ("graph whole", "whole"),
        };
        let now = SystemTime::now();
        let mut span = parent.child(name, SpanKind::Server, now);
        let Some(context) = span.context() else { return };
        span.set("tutti.graph.role", role);
        span.set("tutti.graph.key", key.to_string());
        span.set("tutti.worker.rank", i64::from(self.rank.0));
        if !graph.request_id.is_empty() {
            span.set("tutti.request_id", graph.request_id.clone());
        }
        // Other log lines name only the graph's key. This line connects the key with the trace.
        tracing::debug!(%key, trace_id = context.trace_id(), role, "launched the graph of a sampled request");
        let awaited = match graph {
            pb::LaunchGraph { receive: Some(_), .. } => Some("planes"),
            pb::LaunchGraph { receive_media: Some(_), .. } => Some("embeddings"),
            _ => None,
        };
        let waiting = Some(match awaited {
            Some(of) => directed(context.child("transfer", SpanKind::Server, now), "receive", of),
            None => context.child("queue", SpanKind::Internal, now),
        });
        let sends = graph.send_to.as_ref().map(|_| if encodes { "embeddings" } else { "planes" });
        let trace = GraphTrace { span, context, waiting, work: None, sends, transfer: None };
        self.graphs.insert(key, trace);
    }

    /// Records the rows of sampled requests in a step.
    pub fn step(&mut self, step: StepView<'_>, model: &ModelDeclaration) {
        let times = StepClock::of(step, SystemTime::now(), Instant::now());
        let mut step_span = StepSpan { rank: self.rank, step, times, span: None };
        for row in step.rows() {
            if let Some(graph) = self.graphs.get_mut(&row.key) {
                graph.row(&row, Work::of(row.walk, model), times, &mut step_span);
            }
        }
        step_span.end(model);
    }

    /// Ends the spans of graphs that have ended.
    pub fn completed(&mut self, completions: &[pb::Completion]) {
        for completion in completions {
            let Some(key) = completion.key.map(GraphKey::from) else { continue };
            if let Some(graph) = self.graphs.remove(&key) {
                graph.end(key, completion.outcome.as_ref());
            }
        }
    }
}

/// Sets the attributes of a transfer's span: its direction, and what it transfers.
fn directed(mut span: TraceSpan, direction: &'static str, of: &'static str) -> TraceSpan {
    span.set("tutti.transfer.direction", direction);
    span.set("tutti.transfer.of", of);
    span
}

impl GraphTrace {
    fn row(&mut self, row: &RowRecord, work: Work, times: StepClock, step: &mut StepSpan<'_>) {
        if let Some(waiting) = self.waiting.take() {
            waiting.end_at(times.began);
        }
        if self.work.as_ref().is_none_or(|now| now.work != work) {
            if let Some(before) = self.work.take() {
                before.end();
            }
            let span = self.context.child(work.name(), SpanKind::Internal, times.began);
            self.work = Some(WorkSpan { work, span, rows: 0, latest: times.ended });
        }
        let Some(current) = &mut self.work else { return };
        current.rows += 1;
        current.latest = times.ended;
        let tokens = |event: &'static str, span: &mut TraceSpan| {
            span.event(
                event,
                times.ended,
                vec![
                    KeyValue::new("tutti.step", step.step.number().0 as i64),
                    KeyValue::new("tutti.positions.begin", row.positions.start as i64),
                    KeyValue::new("tutti.positions.end", row.positions.end as i64),
                ],
            );
        };
        match work {
            Work::Encode | Work::Prefill => tokens("chunk", &mut current.span),
            // Only rows 1, 2, 4, 8 and so on are shown, so that a decode of any length takes few events.
            Work::Decode if current.rows.is_power_of_two() => {
                tokens("step", &mut current.span);
                if let Some(sampled) = step.link(&self.context) {
                    current.span.link(&sampled);
                }
            }
            Work::Decode => {}
        }
        if let Some(of) = self.sends
            && self.transfer.is_none()
        {
            let span = self.context.child("transfer", SpanKind::Client, times.ended);
            self.transfer = Some(directed(span, "send", of));
        }
        // The work of a prefill that is handed over ends here; the transfer continues.
        if row.terminal
            && self.sends.is_some()
            && let Some(work) = self.work.take()
        {
            work.end();
        }
    }

    fn end(mut self, key: GraphKey, outcome: Option<&Outcome>) {
        let (word, failure) = match outcome {
            Some(Outcome::Finished(_)) => ("finished", None),
            Some(Outcome::HandedOver(_)) => ("handed_over", None),
            Some(Outcome::Cancelled(_)) => ("cancelled", None),
            Some(Outcome::DeadlineExceeded(_)) => ("deadline_exceeded", None),
            Some(Outcome::Failed(fault)) => ("failed", Some(fault)),
            Some(Outcome::Refused(fault)) => ("refused", Some(fault)),
            Some(Outcome::HandoverFailed(fault)) => ("handover_failed", Some(fault)),
            None => ("unknown", None),
        };
        if let Some(work) = self.work.take() {
            work.end();
        }
        if let (Some(fault), Some(transfer)) = (failure, &mut self.transfer) {
            transfer.fail(fault.message.clone());
        }
        self.span.set("tutti.graph.outcome", word);
        if matches!(outcome, Some(Outcome::DeadlineExceeded(_))) {
            self.span.fail("the request's deadline passed");
        }
        if let Some(fault) = failure {
            let (trace_id, error) = (self.context.trace_id(), &fault.message);
            // A refusal is an answer to a client. If refusals were warnings, refusals of many clients would fill the
            // log.
            if matches!(outcome, Some(Outcome::Refused(_))) {
                tracing::debug!(%key, trace_id, error, "the graph of a sampled request was refused");
            } else {
                tracing::warn!(%key, trace_id, outcome = word, error, "the graph of a sampled request did not finish");
            }
            self.span.fail(fault.message.clone());
        }
        // Child spans end first, so that a collector that has the graph's span also has the child spans.
        drop((self.waiting.take(), self.transfer.take()));
    }
}

/// Begin and end of a step on the wall clock.
#[derive(Clone, Copy)]
struct StepClock {
    began: SystemTime,
    ended: SystemTime,
}

impl StepClock {
    /// Returns the clock of a step. The step's end is known on the monotonic clock. This function converts the end to
    /// wall-clock time by its distance from now.
    fn of(step: StepView<'_>, wall: SystemTime, now: Instant) -> Self {
        let ago: Duration = now.saturating_duration_since(step.collected());
        let began = step.started();
        Self { began, ended: wall.checked_sub(ago).unwrap_or(wall).max(began) }
    }
}

/// The span of a step to which decodes link. The span is the root of a trace of its own, because the step belongs to
/// all of its rows.
struct StepSpan<'a> {
    rank: Rank,
    step: StepView<'a>,
    times: StepClock,
    span: Option<TraceSpan>,
}

impl StepSpan<'_> {
    /// Links the step's span to a graph's span, and returns the context of the step's span.
    fn link(&mut self, graph: &TraceContext) -> Option<TraceContext> {
        let began = self.times.began;
        let span = self.span.get_or_insert_with(|| TraceSpan::root("step", began));
        span.link(graph);
        span.context()
    }

    fn end(self, model: &ModelDeclaration) {
        let Some(mut span) = self.span else { return };
        let us = |time: Duration| time.as_micros() as i64;
        let (times, walk) = (self.step.times(), model.walk(self.step.batch_walk()));
        span.set("tutti.worker.rank", i64::from(self.rank.0));
        span.set("tutti.step", self.step.number().0 as i64);
        span.set("tutti.step.walk", walk.map_or_else(String::new, |walk| walk.name.clone()));
        span.set("tutti.step.rows", self.step.rows().count() as i64);
        span.set("tutti.step.tokens", self.step.rows().map(|row| row.positions.len() as i64).sum::<i64>());
        span.set("tutti.step.plan_us", us(times.plan));
        span.set("tutti.step.run_us", us(times.run));
        span.set("tutti.step.commit_us", us(times.commit));
        span.end_at(self.times.ended);
    }
}
