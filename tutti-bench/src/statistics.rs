//! Counts and histograms of the outcomes. Their size does not depend on the number of requests.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;

use crate::{
    histogram::Histogram,
    outcome::{Failure, FailureKind, Outcome},
    timeline::Timeline,
};

/// Latency bounds of a good request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Objectives {
    /// Maximum time to the first token.
    pub ttft: Option<Duration>,
    /// Maximum mean time per token of a request after its first token.
    pub itl: Option<Duration>,
}

/// Due time and sending time of a request, from the start of the run.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    /// Time at which the request was due. Latencies count from this time.
    pub due: Duration,
    /// Time at which the request was sent.
    pub at: Duration,
}

/// Failures of one kind.
#[derive(Clone, Debug, Serialize)]
pub struct Failures {
    /// The kind.
    pub kind: String,
    /// Number of requests.
    pub count: u64,
    /// The message of the first of these failures.
    pub example: String,
}

/// Counts and histograms of a run.
#[derive(Clone, Debug, Default)]
pub struct Statistics {
    objectives: Objectives,
    /// Requests sent.
    pub sent: u64,
    /// Requests that were answered completely.
    pub served: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Served requests within the objectives.
    pub good: u64,
    /// Prompt tokens of served requests, by the server's count.
    pub prompt_tokens: u64,
    /// Generated tokens of served requests.
    pub output_tokens: u64,
    /// Time from the due time to the first token.
    pub ttft: Histogram,
    /// Time from one event with tokens to the next.
    pub itl: Histogram,
    /// Time per token after the first token. Each request gives one sample.
    pub tpot: Histogram,
    /// Time from the due time to the end of the answer.
    pub latency: Histogram,
    /// Time from the due time to sending. The generator or its limit of requests in flight causes this delay.
    pub delay: Histogram,
    /// The course of the run.
    pub timeline: Timeline,
    failures: BTreeMap<FailureKind, (u64, Failure)>,
}

impl Statistics {
    /// Creates statistics in which nothing is counted.
    pub fn new(objectives: Objectives) -> Self {
        Self { objectives, ..Self::default() }
    }

    /// Number of requests without an outcome.
    pub fn in_flight(&self) -> u64 {
        self.sent - self.served - self.failed
    }

    /// Counts a request that is being sent.
    pub fn send(&mut self, sent: Sent) {
        self.sent += 1;
        self.delay.record(sent.at.saturating_sub(sent.due));
        let in_flight = self.in_flight();
        let bin = self.timeline.at(sent.at);
        bin.sent += 1;
        bin.in_flight = bin.in_flight.max(in_flight);
    }

    /// Counts an outcome. The latencies of a failed request do not count.
    pub fn end(&mut self, sent: Sent, outcome: Outcome) {
        let in_flight = self.in_flight();
        let bin = self.timeline.at(sent.at + outcome.end);
        bin.in_flight = bin.in_flight.max(in_flight);
        if let Some(failure) = outcome.failure {
            bin.failed += 1;
            self.failed += 1;
            self.failures.entry(failure.kind).or_insert((0, failure)).0 += 1;
            return;
        }
        bin.served += 1;
        self.served += 1;
        let delay = sent.at.saturating_sub(sent.due);
        self.latency.record(delay + outcome.end);
        let tpot = outcome.time_per_token();
        let ttft = outcome.first().map(|first| delay + first);
        if let Some(tpot) = tpot {
            self.tpot.record(tpot);
        }
        if let (Some(ttft), Some(first)) = (ttft, outcome.first()) {
            self.ttft.record(ttft);
            self.timeline.at(sent.at + first).first_token(ttft);
        }
        let within = |time: Option<Duration>, bound: Option<Duration>| {
            bound.is_none_or(|bound| time.is_none_or(|time| time <= bound))
        };
        self.good += u64::from(within(ttft, self.objectives.ttft) && within(tpot, self.objectives.itl));
        for pair in outcome.arrivals.windows(2) {
            self.itl.record(pair[1].0.saturating_sub(pair[0].0));
        }
        for (at, tokens) in &outcome.arrivals {
            self.timeline.at(sent.at + *at).tokens += u64::from(*tokens);
        }
        self.output_tokens += u64::from(outcome.tokens());
        self.prompt_tokens += outcome.usage.map_or(0, |usage| u64::from(usage.prompt_tokens));
    }

    /// Failures by kind, the most frequent first.
    pub fn failures(&self) -> Vec<Failures> {
        let list = self.failures.iter().map(|(kind, (count, first))| Failures {
            kind: kind.to_string(),
            count: *count,
            example: first.message.clone(),
        });
        let mut failures: Vec<Failures> = list.collect();
        failures.sort_by_key(|failures| std::cmp::Reverse(failures.count));
        failures
    }
}

#[cfg(test)]
mod tests;
