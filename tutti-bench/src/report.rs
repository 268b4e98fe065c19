//! The report of a run. `docs/bench.md` documents its JSON.

use std::{fmt::Write as _, time::Duration};

use serde::Serialize;
use serde_json::Value;
use tutti_measure::machine::Machine;

use crate::{
    VERSION,
    client::Api,
    histogram::Summary,
    run::Measured,
    statistics::{Failures, Objectives},
    timeline::Interval,
};

/// Name and version of the JSON's schema. A change that breaks readers raises the number.
pub const SCHEMA: &str = "tutti-bench.v1";
/// Maximum 99th percentile of the delay between due time and sending. A larger delay causes a warning, unless the limit
/// of requests in flight explains it.
const MAX_DELAY_MS: f64 = 50.0;

/// A report.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Always [`SCHEMA`].
    pub schema: &'static str,
    /// Version and commit of the generator.
    pub version: &'static str,
    /// The command line.
    pub command: Vec<String>,
    /// Start of the measured run.
    pub started: String,
    /// The generator's machine.
    pub machine: Machine,
    /// The server under load.
    pub target: Served,
    /// The form of the load.
    pub load: Value,
    /// The workload's settings.
    pub workload: Value,
    /// Seconds from the first request to the last answer.
    pub duration_s: f64,
    /// True if the run was interrupted.
    pub interrupted: bool,
    /// Counts of requests.
    pub requests: Requests,
    /// Failures by kind.
    pub failures: Vec<Failures>,
    /// Counts of tokens of served requests.
    pub tokens: Tokens,
    /// Figures per second.
    pub throughput: Throughput,
    /// Requests within the objectives.
    pub goodput: Goodput,
    /// Latencies in milliseconds.
    pub latency: Latency,
    /// Length of an interval of the timeline, in seconds.
    pub interval_s: f64,
    /// The course of the run.
    pub timeline: Vec<Interval>,
    /// Reasons to distrust the figures.
    pub warnings: Vec<String>,
}

/// The server under load.
#[derive(Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Served {
    pub url: String,
    pub api: Api,
    pub model: String,
}

/// Counts of requests.
#[derive(Debug, Serialize)]
pub struct Requests {
    /// Requests before the measured run.
    pub warm_up: u64,
    /// All requests that were sent.
    pub sent: u64,
    /// Requests that were answered completely.
    pub served: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests that were in flight when the run was interrupted.
    pub abandoned: u64,
}

/// Counts of tokens.
#[derive(Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Tokens {
    pub prompt: u64,
    pub output: u64,
}

/// Figures per second, of served requests.
#[derive(Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Throughput {
    pub requests_per_s: f64,
    pub output_tokens_per_s: f64,
    pub prompt_tokens_per_s: f64,
}

/// Requests within the objectives.
#[derive(Debug, Serialize)]
pub struct Goodput {
    /// Bound of the time to the first token.
    pub slo_ttft_ms: Option<f64>,
    /// Bound of the mean time per token after the first.
    pub slo_itl_ms: Option<f64>,
    /// Served requests within the bounds.
    pub requests: u64,
    /// Requests within the bounds, per second.
    pub requests_per_s: f64,
    /// Requests within the bounds, as a share of all requests that were sent and not abandoned.
    pub share: f64,
}

/// Latencies in milliseconds.
#[derive(Debug, Serialize)]
pub struct Latency {
    /// Time from the due time to the first token.
    pub ttft_ms: Summary,
    /// Time from one event with tokens to the next.
    pub itl_ms: Summary,
    /// Time per token after the first token. Each request gives one sample.
    pub tpot_ms: Summary,
    /// Time from the due time to the end of the answer.
    pub e2e_ms: Summary,
    /// Time from the due time to sending.
    pub send_delay_ms: Summary,
}

/// The facts about a run that are not measured.
#[derive(Debug)]
#[expect(missing_docs, reason = "the fields are those of the report")]
pub struct Description {
    pub command: Vec<String>,
    pub started: String,
    pub machine: Machine,
    pub target: Served,
    pub load: Value,
    pub workload: Value,
    pub warm_up: u64,
    pub objectives: Objectives,
    pub warnings: Vec<String>,
}

impl Report {
    /// Summarises a run.
    pub fn new(description: Description, measured: &Measured) -> Self {
        let Description { command, started, machine, target, load, workload, warm_up, objectives, warnings } =
            description;
        let s = &measured.statistics;
        let seconds = measured.duration.as_secs_f64();
        let per_s = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        let ms = |bound: Option<Duration>| bound.map(|bound| bound.as_secs_f64() * 1e3);
        let ended = s.served + s.failed;
        let mut report = Self {
            schema: SCHEMA,
            version: VERSION,
            command,
            started,
            machine,
            target,
            load,
            workload,
            duration_s: seconds,
            interrupted: measured.interrupted,
            requests: Requests {
                warm_up,
                sent: s.sent,
                served: s.served,
                failed: s.failed,
                abandoned: s.in_flight(),
            },
            failures: s.failures(),
            tokens: Tokens { prompt: s.prompt_tokens, output: s.output_tokens },
            throughput: Throughput {
                requests_per_s: per_s(s.served),
                output_tokens_per_s: per_s(s.output_tokens),
                prompt_tokens_per_s: per_s(s.prompt_tokens),
            },
            goodput: Goodput {
                slo_ttft_ms: ms(objectives.ttft),
                slo_itl_ms: ms(objectives.itl),
                requests: s.good,
                requests_per_s: per_s(s.good),
                share: if ended > 0 { s.good as f64 / ended as f64 } else { 0.0 },
            },
            latency: Latency {
                ttft_ms: s.ttft.summary(),
                itl_ms: s.itl.summary(),
                tpot_ms: s.tpot.summary(),
                e2e_ms: s.latency.summary(),
                send_delay_ms: s.delay.summary(),
            },
            interval_s: s.timeline.width().as_secs_f64(),
            timeline: s.timeline.intervals(),
            warnings,
        };
        report.warn();
        report
    }

    fn warn(&mut self) {
        let Requests { sent, served, failed, abandoned, .. } = self.requests;
        let mut warn = |condition: bool, text: String| {
            if condition {
                self.warnings.push(text);
            }
        };
        let delay = self.latency.send_delay_ms.p99;
        warn(
            self.interrupted,
            format!("interrupted with {abandoned} requests in flight, which count for nothing"),
        );
        warn(failed > 0, format!("{failed} of {sent} requests failed; their times do not count"));
        warn(served == 0, "no request was served".into());
        warn(
            delay > MAX_DELAY_MS,
            format!(
                "requests were sent {delay:.0} ms after they were due, at the 99th percentile: --max-in-flight held them \
                 back, or this machine is too slow for the load"
            ),
        );
    }

    /// True if every request was served.
    pub fn all_served(&self) -> bool {
        self.requests.served > 0 && self.requests.failed == 0
    }

    /// The report as JSON text.
    pub fn json(&self) -> Result<String, serde_json::Error> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// The report as an HTML page.
    pub fn html(&self) -> String {
        crate::html::page(self)
    }

    /// The main figures as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let Requests { sent, served, failed, .. } = self.requests;
        let mut line = |line: String| {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{line}");
        };
        line(format!("{} ({:?}) at {}", self.target.model, self.target.api, self.target.url));
        line(format!("{sent} requests sent, {served} served, {failed} failed in {:.1} s", self.duration_s));
        let Throughput { requests_per_s, output_tokens_per_s, prompt_tokens_per_s } = self.throughput;
        line(format!(
            "{requests_per_s:.2} requests/s, {output_tokens_per_s:.1} output tokens/s, {prompt_tokens_per_s:.1} prompt tokens/s"
        ));
        let Goodput { slo_ttft_ms, slo_itl_ms, requests_per_s, share, .. } = self.goodput;
        if slo_ttft_ms.or(slo_itl_ms).is_some() {
            line(format!("goodput {requests_per_s:.2} requests/s, {:.1} % of the requests", share * 100.0));
        }
        line(format!("{:<6}{:>10}{:>10}{:>10}{:>10}{:>10}", "ms", "mean", "p50", "p90", "p99", "max"));
        for (name, s) in self.latencies() {
            line(format!(
                "{name:<6}{:>10.2}{:>10.2}{:>10.2}{:>10.2}{:>10.2}",
                s.mean, s.p50, s.p90, s.p99, s.max
            ));
        }
        for Failures { kind, count, example } in &self.failures {
            line(format!("failed: {count} × {kind}: {example}"));
        }
        for warning in &self.warnings {
            line(format!("warning: {warning}"));
        }
        text
    }

    /// The latencies of requests, with their short names.
    pub(crate) fn latencies(&self) -> [(&'static str, &Summary); 4] {
        let Latency { ttft_ms, itl_ms, tpot_ms, e2e_ms, .. } = &self.latency;
        [("TTFT", ttft_ms), ("ITL", itl_ms), ("TPOT", tpot_ms), ("E2E", e2e_ms)]
    }
}
