//! `conductor trace`: the life of one of the last requests, as a waterfall of text.

use tutti_proto::cluster::v1::{self as pb, request_transition::Transition};
use tutti_runtime::{Error, ErrorKind};
use tutti_settings::TraceProcessSettings;

use super::{
    call::Calls,
    table::{duration, table},
};

/// Width of the bars in characters.
const BAR: u64 = 40;

/// Calls the conductor and returns the waterfall, or the list of the newest requests.
pub(super) async fn run(calls: Calls, settings: TraceProcessSettings) -> Result<String, Error> {
    calls.watch_steps().await?;
    let number = settings.traced.request.map(u64::from);
    let requests = calls.requests(number).await?;
    match (number, requests.first()) {
        (None, _) => Ok(list(&requests)),
        (Some(_), Some(request)) => Ok(waterfall(request)),
        (Some(number), None) => {
            let message = format!("request {number} is not among the last requests of the conductor");
            Err(Error::new(ErrorKind::NotFound, message))
        }
    }
}

/// A phase of a request's life, in microseconds since its arrival.
#[derive(Debug, PartialEq, Eq)]
struct Phase {
    name: String,
    from: u64,
    to: u64,
    /// True if the phase goes on.
    goes_on: bool,
}

/// Cuts a request's life into phases, in the order in which they begin. A chunk of prefill lies within its prefill.
fn phases(transitions: &[pb::RequestTransition]) -> Vec<Phase> {
    let Some(begin) = transitions.first().map(|it| it.at_us) else { return Vec::new() };
    let mut found = Vec::new();
    let mut running: Option<(String, u64)> = None;
    let mut end = 0;
    for it in transitions {
        let Some(transition) = &it.transition else { continue };
        let at = it.at_us.saturating_sub(begin);
        end = at;
        let next = match transition {
            Transition::Accepted(_) => Some("queue".to_owned()),
            Transition::Replayed(_) => Some("queue, starts over".to_owned()),
            Transition::Launched(pb::Launched { role, worker }) => Some(match role.as_str() {
                "decode" => format!("room for decode, worker {worker}"),
                "encode" => format!("encode, worker {worker}"),
                _ => format!("queue and prefill, worker {worker}"),
            }),
            Transition::FirstToken(_) => Some("decode".to_owned()),
            Transition::Ended(_) => None,
            Transition::PrefillChunk(pb::PrefillChunk { worker, tokens, took_us }) => {
                let from = at.saturating_sub((*took_us).into());
                let name = format!("  chunk of {tokens} tokens, worker {worker}");
                found.push(Phase { name, from, to: at, goes_on: false });
                continue;
            }
            Transition::HandedOver(_) => {
                found.push(Phase { name: "  transfer done".into(), from: at, to: at, goes_on: false });
                continue;
            }
        };
        if let Some((name, from)) = running.take() {
            found.push(Phase { name, from, to: at, goes_on: false });
        }
        running = next.map(|name| (name, at));
    }
    if let Some((name, from)) = running {
        found.push(Phase { name, from, to: end, goes_on: true });
    }
    found.sort_by_key(|phase| (phase.from, u64::MAX - phase.to));
    found
}

/// How the request ended, or that it has not.
fn outcome(request: &pb::RecentRequest) -> &str {
    let ended = request.transitions.iter().find_map(|it| match &it.transition {
        Some(Transition::Ended(pb::RequestEnded { outcome })) => Some(outcome.as_str()),
        _ => None,
    });
    ended.unwrap_or("in progress")
}

/// Time from the request's arrival to its last transition, in microseconds.
fn lifetime(request: &pb::RecentRequest) -> u64 {
    let times = || request.transitions.iter().map(|it| it.at_us);
    times().max().unwrap_or_default().saturating_sub(times().next().unwrap_or_default())
}

fn waterfall(request: &pb::RecentRequest) -> String {
    let whole = lifetime(request);
    let row = |phase: Phase| {
        let took = duration(phase.to - phase.from);
        let took = if phase.goes_on { format!("{took}+") } else { took };
        [phase.name.clone(), duration(phase.from), took, bar(phase.from, phase.to, whole)]
    };
    let rows: Vec<_> = phases(&request.transitions).into_iter().map(row).collect();
    let pb::RecentRequest { request: number, prompt_tokens, generated, .. } = request;
    format!(
        "request {number}: {}, {prompt_tokens} prompt tokens, {generated} output tokens, {}\n\n{}",
        outcome(request),
        duration(whole),
        table(["PHASE", "AFTER", "TOOK", ""], [false, true, true, false], &rows)
    )
}

/// The share of a request's life from `from` to `to`: at least one character.
fn bar(from: u64, to: u64, whole: u64) -> String {
    let share = |us: u64| (us * BAR).checked_div(whole).unwrap_or_default();
    let start = share(from).min(BAR - 1);
    let length = (share(to).saturating_sub(start)).clamp(1, BAR - start);
    format!(
        "|{}{}{}|",
        " ".repeat(start as usize),
        "#".repeat(length as usize),
        " ".repeat((BAR - start - length) as usize)
    )
}

fn list(requests: &[pb::RecentRequest]) -> String {
    let row = |request: &pb::RecentRequest| {
        [
            request.request.to_string(),
            outcome(request).to_owned(),
            request.prompt_tokens.to_string(),
            request.generated.to_string(),
            duration(lifetime(request)),
        ]
    };
    let rows: Vec<_> = requests.iter().map(row).collect();
    table(["REQUEST", "OUTCOME", "PROMPT", "OUTPUT", "TIME"], [true, false, true, true, true], &rows)
}

#[cfg(test)]
mod tests;
