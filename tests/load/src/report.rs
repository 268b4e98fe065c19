//! The figures of a run, and the reasons, if any, why they must not be used.

use std::time::Duration;

use serde::Serialize;
use tutti_measure::statistics::Summary;

use crate::{client::Record, plan::Workload};

/// Maximum 99th percentile of [`Report::lag_ms`] in a valid report. With more lag, the figures would describe the
/// generator, not the server.
pub const MAX_LAG: Duration = Duration::from_millis(50);

/// The figures of a run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Parameters of the requests that were sent.
    pub workload: Workload,
    /// Seconds from the first request to the last answer.
    pub duration_s: f64,
    /// Number of requests that returned as many tokens as they asked for.
    pub served: usize,
    /// Reasons of failures, each with the number of requests that failed for it.
    pub failures: Vec<(String, usize)>,
    /// Served requests per second.
    pub requests_per_s: f64,
    /// Generated tokens per second, of served requests.
    pub output_tokens_per_s: f64,
    /// Prompt tokens per second, of served requests.
    pub prompt_tokens_per_s: f64,
    /// Milliseconds from sending to the first token.
    pub ttft_ms: Summary,
    /// Milliseconds between one event with tokens and the next.
    pub itl_ms: Summary,
    /// Milliseconds per token after the first; one sample per request.
    pub tpot_ms: Summary,
    /// Milliseconds from sending to the end of the stream.
    pub latency_ms: Summary,
    /// Milliseconds between the planned and the actual time of sending.
    pub lag_ms: Summary,
    /// Reasons why the figures must not be used; empty for a valid report.
    pub invalid: Vec<String>,
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Report {
    /// Summarises the records of a run that took `duration`.
    pub fn new(workload: Workload, records: &[Record], duration: Duration) -> Self {
        let served: Vec<&Record> = records.iter().filter(|record| record.failure.is_none()).collect();
        let seconds = duration.as_secs_f64();
        let sum = |count: fn(&Record) -> u32| served.iter().map(|r| f64::from(count(r))).sum::<f64>();
        let each =
            |time: fn(&Record) -> Option<f64>| Summary::of(served.iter().filter_map(|r| time(r)).collect());
        let gaps = served.iter().flat_map(|r| r.arrivals.windows(2).map(|w| ms(w[1].0 - w[0].0)));
        let mut report = Self {
            duration_s: seconds,
            served: served.len(),
            failures: failures(records),
            requests_per_s: served.len() as f64 / seconds,
            output_tokens_per_s: sum(|r| r.tokens) / seconds,
            prompt_tokens_per_s: sum(|r| r.prompt_tokens) / seconds,
            ttft_ms: each(|r| r.arrivals.first().map(|(at, _)| ms(*at))),
            itl_ms: Summary::of(gaps.collect()),
            tpot_ms: each(time_per_token),
            latency_ms: each(|r| Some(ms(r.end))),
            lag_ms: Summary::of(records.iter().map(|r| ms(r.lag)).collect()),
            invalid: Vec::new(),
            workload,
        };
        report.invalid = report.doubts();
        report
    }

    fn doubts(&self) -> Vec<String> {
        let failed: usize = self.failures.iter().map(|(_, times)| times).sum();
        let mut doubts = Vec::new();
        if failed > 0 {
            doubts.push(format!("{failed} of {} requests failed", self.workload.requests));
        }
        if self.served == 0 {
            doubts.push("no request was served".into());
        }
        if self.lag_ms.p99 > ms(MAX_LAG) {
            doubts.push(format!("the generator was {:.0} ms late at its 99th percentile", self.lag_ms.p99));
        }
        doubts
    }
}

fn time_per_token(record: &Record) -> Option<f64> {
    let (first, _) = record.arrivals.first()?;
    let (last, _) = record.arrivals.last()?;
    let after_first: u32 = record.arrivals[1..].iter().map(|(_, tokens)| tokens).sum();
    (after_first > 0).then(|| ms(*last - *first) / f64::from(after_first))
}

fn failures(records: &[Record]) -> Vec<(String, usize)> {
    let mut counted: Vec<(String, usize)> = Vec::new();
    for why in records.iter().filter_map(|record| record.failure.as_ref()) {
        match counted.iter_mut().find(|(seen, _)| seen == why) {
            Some((_, times)) => *times += 1,
            None => counted.push((why.clone(), 1)),
        }
    }
    counted
}

#[cfg(test)]
mod tests;
