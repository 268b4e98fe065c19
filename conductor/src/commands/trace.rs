//! `conductor trace`: the phases of one recent request, as a waterfall chart in text.

use tutti_proto::cluster::v1::{self as pb, request_transition::Transition};
use tutti_runtime::{Error, ErrorKind};
use tutti_settings::TraceProcessSettings;

use super::{
    call::Calls,
    table::{duration, table},
};

/// Width of the bars in characters.
const BAR: u64 = 40;

/// Calls the conductor and returns the waterfall, or the list of the requests that run and of the last that have ended.
pub(super) async fn run(calls: Calls, settings: TraceProcessSettings) -> Result<String, Error> {
    calls.watch_steps().await?;
    let number = settings.traced.request.map(u64::from);
    let pb::GetRequestsResponse { requests, now_us } = calls.requests(number).await?;
    match (number, requests.first()) {
        (None, _) => Ok(list(&requests, now_us)),
        (Some(_), Some(request)) => Ok(waterfall(request, now_us)),
        (Some(number), None) => {
            let message = format!("request {number} is not among the last requests of the conductor");
            Err(Error::new(ErrorKind::NotFound, message))
        }
    }
}

/// One phase of a request. Times are in microseconds since the request's arrival.
#[derive(Debug, PartialEq, Eq)]
struct Phase {
    name: String,
    from: u64,
    to: u64,
    /// True if the phase has not ended yet.
    goes_on: bool,
}

/// Splits a request's transitions into phases, in the order in which the phases begin. A prefill chunk lies within its
/// prefill. A phase that goes on lasts until `now_us`, on the conductor's clock.
fn phases(transitions: &[pb::RequestTransition], now_us: u64) -> Vec<Phase> {
    let Some(begin) = transitions.first().map(|it| it.at_us) else { return Vec::new() };
    let mut found = Vec::new();
    let mut running: Option<(String, u64)> = None;
    for it in transitions {
        let Some(transition) = &it.transition else { continue };
        let at = it.at_us.saturating_sub(begin);
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
            // The clock may have been set back.
            found.push(Phase { name, from, to: at.max(from), goes_on: false });
        }
        running = next.map(|name| (name, at));
    }
    if let Some((name, from)) = running {
        let to = now_us.saturating_sub(begin).max(from);
        found.push(Phase { name, from, to, goes_on: true });
    }
    found.sort_by_key(|phase| (phase.from, u64::MAX - phase.to));
    found
}

/// The request's outcome; `None` if it has not ended.
fn outcome(request: &pb::RecentRequest) -> Option<&str> {
    request.transitions.iter().find_map(|it| match &it.transition {
        Some(Transition::Ended(pb::RequestEnded { outcome, .. })) => Some(outcome.as_str()),
        _ => None,
    })
}

const IN_PROGRESS: &str = "in progress";

/// Time from the request's arrival to its end, or to `now_us` if it is in progress, in microseconds.
fn lifetime(request: &pb::RecentRequest, now_us: u64) -> u64 {
    let times = || request.transitions.iter().map(|it| it.at_us);
    let last = times().max().unwrap_or_default();
    let end = if outcome(request).is_some() { last } else { last.max(now_us) };
    times().next().map_or(0, |begin| end.saturating_sub(begin))
}

fn waterfall(request: &pb::RecentRequest, now_us: u64) -> String {
    let whole = lifetime(request, now_us);
    let row = |phase: Phase| {
        let took = duration(phase.to - phase.from);
        let took = if phase.goes_on { format!("{took}+") } else { took };
        [phase.name.clone(), duration(phase.from), took, bar(phase.from, phase.to, whole)]
    };
    let rows: Vec<_> = phases(&request.transitions, now_us).into_iter().map(row).collect();
    let pb::RecentRequest { request: number, prompt_tokens, generated, request_id, .. } = request;
    let name = if request_id.is_empty() { String::new() } else { format!(", id {request_id}") };
    format!(
        "request {number}: {}, {prompt_tokens} prompt tokens, {generated} output tokens, {}{name}\n\n{}",
        outcome(request).unwrap_or(IN_PROGRESS),
        duration(whole),
        table(["PHASE", "AFTER", "TOOK", ""], [false, true, true, false], &rows)
    )
}

/// Draws the phase from `from` to `to` as a bar in a line for the whole request. The bar has at least one character.
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

fn list(requests: &[pb::RecentRequest], now_us: u64) -> String {
    let row = |request: &pb::RecentRequest| {
        [
            request.request.to_string(),
            outcome(request).unwrap_or(IN_PROGRESS).to_owned(),
            request.prompt_tokens.to_string(),
            request.generated.to_string(),
            duration(lifetime(request, now_us)),
            request.request_id.clone(),
        ]
    };
    let rows: Vec<_> = requests.iter().map(row).collect();
    let head = ["REQUEST", "OUTCOME", "PROMPT", "OUTPUT", "TIME", "ID"];
    table(head, [true, false, true, true, true, false], &rows)
}

#[cfg(test)]
mod tests;
