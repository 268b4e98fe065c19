//! `/cluster/…`: data for the web page's view of the cluster.
//!
//! A caller with any valid API key may read this data. It has numbers, names of workers and times, but no text of
//! prompts or answers. Only an operator's key, or a router without keys, shows the ids that clients gave to requests.
//! Reads count against no limit of the key, because the page reads once per second. Only an operator's key may cancel
//! requests.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::{Path, Query, State},
    http::StatusCode,
};
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tutti_proto::cluster::v1::{self as pb, request_transition::Transition};
use tutti_runtime::{Error, ErrorKind, worker_view::WorkerView};

use super::{Api, error::ApiError};
use crate::{fleet::Member, history::Samples, keys::Caller};

#[derive(Serialize)]
pub struct ClusterState {
    /// True if the caller may cancel requests.
    may_cancel: bool,
    conductors: Vec<ConductorState>,
}

#[derive(Serialize)]
struct ConductorState {
    name: String,
    /// True if the conductor gets requests of this router.
    ready: bool,
    /// The reason that the conductor gets no requests, or the error of its last call.
    reason: Option<String>,
    requests_in_flight: u32,
    /// Version of the conductor's build; empty if it does not answer.
    build: String,
    /// Seconds since the conductor's start; `null` if it does not answer.
    up_s: Option<u64>,
    /// Tries of requests that were lost with their worker and repeated.
    replays: u64,
    groups: Vec<GroupState>,
    workers: Vec<WorkerView>,
}

#[derive(Serialize)]
struct GroupState {
    name: String,
    first_rank: u32,
    /// Number of the group's ranks, and of those that have a worker.
    ranks: u32,
    joined: u32,
    /// True if the conductor starts the workers.
    spawned: bool,
}

#[derive(Serialize)]
pub struct Steps {
    /// Time of the answer by the conductor's clock, in microseconds since the Unix epoch.
    now_us: u64,
    steps: Vec<Step>,
}

#[derive(Serialize)]
struct Step {
    sequence: u64,
    worker: u32,
    step: u64,
    reported_us: u64,
    took_us: u32,
    tokens: u32,
    budget_tokens: u32,
    decode_rows: u32,
    padding_tokens: u32,
    prefills: Vec<Prefill>,
}

#[derive(Serialize)]
struct Prefill {
    request: u64,
    tokens: u32,
}

#[derive(Serialize)]
pub struct Requests {
    /// Time of the answer by the conductor's clock, in microseconds since the Unix epoch.
    now_us: u64,
    requests: Vec<RequestState>,
}

#[derive(Serialize)]
pub struct RequestState {
    request: u64,
    /// The id by which the client and all logs name the request; empty if there is none, or if the caller may not
    /// see it.
    request_id: String,
    /// Microseconds from the request's arrival to its end, or to this answer if it is in progress.
    took_us: u64,
    prompt_tokens: u32,
    generated: u32,
    transitions: Vec<TransitionState>,
}

#[derive(Default, Serialize)]
struct TransitionState {
    kind: &'static str,
    at_us: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    took_us: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    outcome: Option<String>,
    /// Message of the error with which the request ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<String>,
}

/// Query parameters of a route about one conductor. The default is the first conductor.
#[derive(Deserialize)]
pub struct Which {
    conductor: Option<String>,
    /// Sequence number of the newest step that the caller already has.
    #[serde(default)]
    after: u64,
}

/// Query parameters of a cancellation.
#[derive(Deserialize)]
pub struct Cancelled {
    conductor: Option<String>,
    /// Time at which the request was accepted, in microseconds. A conductor uses the numbers of requests again after a
    /// restart, but not the time. 0 if the number is enough.
    #[serde(default)]
    accepted_us: u64,
}

/// Query parameters of the history.
#[derive(Deserialize)]
pub struct Known {
    /// Name of the process whose samples the caller has.
    #[serde(default)]
    process: String,
    /// Sequence number of the newest of them.
    #[serde(default)]
    after: u64,
}

/// The conductors and their workers.
pub async fn state(State(api): State<Api>, Extension(caller): Extension<Caller>) -> Json<ClusterState> {
    let members = api.generator.fleet().members();
    let conductors = join_all(members.iter().map(|member| conductor(member))).await;
    Json(ClusterState { may_cancel: caller.operator().is_some(), conductors })
}

/// The samples of this router's metrics that the caller does not have.
pub async fn history(State(api): State<Api>, Query(known): Query<Known>) -> Json<Samples> {
    Json(api.history.after(&known.process, known.after))
}

/// Ends a request with an error for its client. `id` is the conductor's number of the request.
pub async fn cancel(
    State(api): State<Api>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<u64>,
    Query(Cancelled { conductor, accepted_us }): Query<Cancelled>,
) -> Result<StatusCode, ApiError> {
    let Some(operator) = caller.operator() else {
        let message = "only an API key whose line in the file of keys says `operator` may cancel requests";
        return Err(Error::new(ErrorKind::Forbidden, message).into());
    };
    let member = find(&api, conductor.as_deref())?;
    member.cancel(id, accepted_us).await?;
    tracing::info!(
        request = id,
        conductor = member.name,
        key = operator,
        "an operator has cancelled a request"
    );
    Ok(StatusCode::NO_CONTENT)
}

/// The newest steps of a conductor's workers, with sequence numbers above `after`.
pub async fn steps(State(api): State<Api>, Query(which): Query<Which>) -> Result<Json<Steps>, ApiError> {
    let answer = find(&api, which.conductor.as_deref())?.steps(which.after).await?;
    Ok(Json(Steps { now_us: answer.now_us, steps: answer.steps.into_iter().map(step).collect() }))
}

/// The requests of a conductor that run, and the last ones that have ended.
pub async fn requests(
    State(api): State<Api>,
    Extension(caller): Extension<Caller>,
    Query(which): Query<Which>,
) -> Result<Json<Requests>, ApiError> {
    let pb::GetRequestsResponse { requests, now_us } =
        find(&api, which.conductor.as_deref())?.requests(None).await?;
    let requests = requests.into_iter().map(|it| request(it, now_us, &caller)).collect();
    Ok(Json(Requests { now_us, requests }))
}

/// One request of a conductor. `id` is the conductor's number of the request.
pub async fn one_request(
    State(api): State<Api>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<u64>,
    Query(which): Query<Which>,
) -> Result<Json<RequestState>, ApiError> {
    let mut answer = find(&api, which.conductor.as_deref())?.requests(Some(id)).await?;
    let found = answer.requests.pop().ok_or_else(|| {
        Error::new(ErrorKind::NotFound, format!("request {id} is not among the last ones of the conductor"))
    })?;
    Ok(Json(request(found, answer.now_us, &caller)))
}

/// The conductor of this name. Without a name, the first one.
fn find(api: &Api, name: Option<&str>) -> Result<Arc<Member>, Error> {
    let wanted = |member: &Arc<Member>| name.is_none_or(|name| member.name == name);
    api.generator.fleet().members().into_iter().find(wanted).ok_or_else(|| {
        let name = name.unwrap_or_default();
        Error::new(ErrorKind::NotFound, format!("there is no conductor {name:?}"))
    })
}

async fn conductor(member: &Member) -> ConductorState {
    let why_out = member.standing.lock().why_out();
    let (cluster, silent) = match member.cluster().await {
        Ok(cluster) => (cluster, None),
        Err(error) => (pb::GetClusterResponse::default(), Some(error.to_string())),
    };
    ConductorState {
        name: member.name.clone(),
        ready: why_out.is_none() && silent.is_none(),
        reason: why_out.or(silent),
        requests_in_flight: cluster.requests_in_flight,
        up_s: (cluster.started_us > 0).then(|| cluster.now_us.saturating_sub(cluster.started_us) / 1_000_000),
        build: cluster.build,
        replays: cluster.replays,
        groups: cluster.groups.into_iter().map(group).collect(),
        workers: cluster.workers.into_iter().map(WorkerView::from).collect(),
    }
}

fn group(group: pb::GroupStatus) -> GroupState {
    GroupState {
        name: group.name,
        first_rank: group.first_rank,
        ranks: group.ranks,
        joined: group.joined,
        spawned: group.spawned,
    }
}

fn step(step: pb::RecentStep) -> Step {
    let prefill = |row: pb::PrefillRow| Prefill { request: row.request, tokens: row.tokens };
    Step {
        sequence: step.sequence,
        worker: step.worker,
        step: step.step,
        reported_us: step.reported_us,
        took_us: step.took_us,
        tokens: step.tokens,
        budget_tokens: step.budget_tokens,
        decode_rows: step.decode_rows,
        padding_tokens: step.padding_tokens,
        prefills: step.prefills.into_iter().map(prefill).collect(),
    }
}

fn request(request: pb::RecentRequest, now_us: u64, caller: &Caller) -> RequestState {
    let took_us = took_us(&request.transitions, now_us);
    RequestState {
        request: request.request,
        request_id: if caller.sees_request_ids() { request.request_id } else { String::new() },
        took_us,
        prompt_tokens: request.prompt_tokens,
        generated: request.generated,
        transitions: request.transitions.into_iter().filter_map(transition).collect(),
    }
}

/// Time from a request's first transition to its end, or to `now_us` if it has not ended.
fn took_us(transitions: &[pb::RequestTransition], now_us: u64) -> u64 {
    let (Some(first), Some(last)) = (transitions.first(), transitions.last()) else { return 0 };
    let is_over = matches!(last.transition, Some(Transition::Ended(_)));
    let end = if is_over { last.at_us } else { last.at_us.max(now_us) };
    end.saturating_sub(first.at_us)
}

/// A transition; `None` if this build does not know its kind.
fn transition(given: pb::RequestTransition) -> Option<TransitionState> {
    let at_us = given.at_us;
    let of = |kind| TransitionState { kind, at_us, ..Default::default() };
    Some(match given.transition? {
        Transition::Accepted(_) => of("accepted"),
        Transition::Launched(it) => {
            TransitionState { role: Some(it.role), worker: Some(it.worker), ..of("launched") }
        }
        Transition::PrefillChunk(it) => TransitionState {
            worker: Some(it.worker),
            tokens: Some(it.tokens),
            took_us: Some(it.took_us),
            ..of("prefill_chunk")
        },
        Transition::FirstToken(_) => of("first_token"),
        Transition::HandedOver(_) => of("handed_over"),
        Transition::Replayed(_) => of("replayed"),
        Transition::Ended(it) => {
            let cause = (!it.cause.is_empty()).then_some(it.cause);
            TransitionState { outcome: Some(it.outcome), cause, ..of("ended") }
        }
    })
}

#[cfg(test)]
mod tests;
