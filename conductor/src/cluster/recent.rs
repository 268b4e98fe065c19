//! The last steps and requests, for operators' pages.
//!
//! All lists are bounded: those of requests in progress by the requests that the cluster admits. Steps are recorded
//! only while a client asks for them. A request costs two allocations on arrival, and a token costs none.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use tutti_proto::{
    Rank, RequestId,
    cluster::v1::{self as pb, request_transition::Transition},
};

use super::Cluster;
use crate::request::{EndingKind, GraphRole};

/// Time for which steps are recorded after a client has last asked for them.
const WATCHED: Duration = Duration::from_secs(60);
/// Maximum number of steps recorded per worker.
const STEPS: usize = 128;
/// Maximum number of ended requests recorded.
const ENDED: usize = 512;
/// Once a request has this many transitions, its further prefill chunks are not recorded.
const CHUNKS: usize = 64;
/// Maximum number of transitions recorded per request, not counting its end.
const TRANSITIONS: usize = 2 * CHUNKS;
/// Number of transitions, including the end, of a request that runs on one worker and is prefilled in one chunk.
const USUAL_TRANSITIONS: usize = 4;
/// Maximum number of requests in progress in an answer of `GetRequests`. The oldest ones are those that somebody looks
/// for.
const ANSWERED_RUNNING: usize = 1024;
/// Maximum number of ended requests in an answer of `GetRequests`.
const ANSWERED: usize = 64;
/// Bytes of an error's message that are recorded.
const CAUSE_BYTES: usize = 400;

/// The last steps of each worker, and the last requests.
#[derive(Debug, Default)]
pub(super) struct Recent {
    watched: Option<Instant>,
    steps: BTreeMap<Rank, VecDeque<pb::RecentStep>>,
    /// Number of steps recorded so far.
    sequence: u64,
    /// All requests in progress.
    running: BTreeMap<RequestId, pb::RecentRequest>,
    /// The last requests that have ended, in the order of their ends.
    ended: VecDeque<pb::RecentRequest>,
}

impl Recent {
    /// Notes that a client has asked for steps.
    fn watch(&mut self, now: Instant) {
        self.watched = Some(now);
    }

    /// Records a step and its prefill rows, if a client has asked for steps recently.
    pub fn step(
        &mut self,
        worker: Rank,
        step: u64,
        work: &pb::StepWork,
        prefills: Vec<pb::PrefillRow>,
        now: Instant,
    ) {
        let Some(asked) = self.watched else { return };
        if now.saturating_duration_since(asked) > WATCHED {
            self.watched = None;
            self.steps.clear();
            return;
        }
        let took_us = work.plan_us.saturating_add(work.run_us).saturating_add(work.commit_us);
        for row in &prefills {
            let chunk = pb::PrefillChunk { worker: worker.0, tokens: row.tokens, took_us };
            self.happened(RequestId(row.request), Transition::PrefillChunk(chunk));
        }
        self.sequence += 1;
        let steps = self.steps.entry(worker).or_default();
        if steps.len() == STEPS {
            steps.pop_front();
        }
        steps.push_back(pb::RecentStep {
            sequence: self.sequence,
            worker: worker.0,
            step,
            reported_us: unix_us(),
            took_us,
            tokens: work.tokens,
            budget_tokens: work.budget_tokens,
            decode_rows: work.decode_rows,
            padding_tokens: work.padding_tokens,
            prefills,
        });
    }

    /// Forgets the steps of a worker that is gone.
    pub fn gone(&mut self, worker: Rank) {
        self.steps.remove(&worker);
    }

    /// Records a new request. `request_id` is the client's.
    pub fn accepted(&mut self, id: RequestId, prompt_tokens: usize, request_id: &str) {
        let request = pb::RecentRequest {
            request: id.0,
            prompt_tokens: u32::try_from(prompt_tokens).unwrap_or(u32::MAX),
            generated: 0,
            transitions: Vec::with_capacity(USUAL_TRANSITIONS),
            request_id: request_id.to_owned(),
        };
        self.running.insert(id, request);
        self.happened(id, Transition::Accepted(pb::Accepted {}));
    }

    /// Notes that a graph of a request was launched. `worker` is the leader of the graph's workers.
    pub fn launched(&mut self, id: RequestId, role: GraphRole, worker: Option<Rank>) {
        let role = match role {
            GraphRole::Whole => "whole",
            GraphRole::Prefill => "prefill",
            GraphRole::Decode => "decode",
            GraphRole::Encode => "encode",
        };
        let worker = worker.map_or(0, |rank| rank.0);
        self.happened(id, Transition::Launched(pb::Launched { role: role.into(), worker }));
    }

    /// Counts output tokens. The first tokens of each try are also recorded as a transition.
    pub fn generated(&mut self, id: RequestId, tokens: usize) {
        let Some(request) = self.running.get_mut(&id) else { return };
        request.generated = request.generated.saturating_add(tokens as u32);
        let answers = request.transitions.iter().rev().find_map(|it| match it.transition {
            Some(Transition::FirstToken(_)) => Some(true),
            Some(Transition::Accepted(_) | Transition::Replayed(_)) => Some(false),
            _ => None,
        });
        if answers != Some(true) {
            self.happened(id, Transition::FirstToken(pb::FirstToken {}));
        }
    }

    /// Notes that a prefill was handed over.
    pub fn handed_over(&mut self, id: RequestId) {
        self.happened(id, Transition::HandedOver(pb::PrefillHandedOver {}));
    }

    /// Notes that a request starts over.
    pub fn replayed(&mut self, id: RequestId) {
        self.happened(id, Transition::Replayed(pb::Replayed {}));
    }

    /// Notes a request's end.
    pub fn ended(&mut self, id: RequestId, kind: EndingKind, cause: &str) {
        let outcome = match kind {
            EndingKind::Finished => "finished",
            EndingKind::Cancelled => "cancelled",
            EndingKind::Failed(kind) => kind.label(),
            EndingKind::Refused(_) => "refused",
        };
        let cause = cause[..cause.floor_char_boundary(CAUSE_BYTES)].to_owned();
        self.happened(id, Transition::Ended(pb::RequestEnded { outcome: outcome.into(), cause }));
        let Some(request) = self.running.remove(&id) else { return };
        if self.ended.len() == ENDED {
            self.ended.pop_front();
        }
        self.ended.push_back(request);
    }

    /// Records a transition of a request in progress. A step may be reported after its request has ended.
    fn happened(&mut self, id: RequestId, transition: Transition) {
        let Some(request) = self.running.get_mut(&id) else { return };
        let most = match transition {
            Transition::Ended(_) => usize::MAX,
            Transition::PrefillChunk(_) => CHUNKS,
            _ => TRANSITIONS,
        };
        if request.transitions.len() < most {
            let transition = pb::RequestTransition { at_us: unix_us(), transition: Some(transition) };
            request.transitions.push(transition);
        }
    }

    fn find(&self, id: RequestId) -> Option<&pb::RecentRequest> {
        self.running.get(&id).or_else(|| self.ended.iter().rev().find(|request| request.request == id.0))
    }

    /// The time at which a request was accepted, if the request is recorded.
    pub fn accepted_us(&self, id: RequestId) -> Option<u64> {
        Some(self.find(id)?.transitions.first()?.at_us)
    }

    /// The oldest requests in progress, and the last ones that have ended. The newest is first.
    fn running_and_last(&self) -> Vec<pb::RecentRequest> {
        let ended = self.ended.iter().rev().take(ANSWERED);
        let mut answer: Vec<_> = self.running.values().take(ANSWERED_RUNNING).chain(ended).cloned().collect();
        answer.sort_unstable_by_key(|request| std::cmp::Reverse(request.request));
        answer
    }

    /// The recorded steps with a sequence number above `after`, in order.
    fn steps_after(&self, after: u64) -> Vec<pb::RecentStep> {
        let known = |steps: &VecDeque<pb::RecentStep>| steps.partition_point(|step| step.sequence <= after);
        let steps = self.steps.values().flat_map(|steps| steps.range(known(steps)..));
        let mut steps: Vec<_> = steps.cloned().collect();
        steps.sort_by_key(|step| step.sequence);
        steps
    }
}

impl Cluster {
    /// The recorded steps with a sequence number above `after`. From now on, steps are recorded for a minute.
    pub fn recent_steps(&self, after: u64) -> pb::GetStepsResponse {
        let mut state = self.state.lock();
        state.recent.watch(Instant::now());
        pb::GetStepsResponse { steps: state.recent.steps_after(after), now_us: unix_us() }
    }

    /// The request with this id, if the request is still recorded. Without an id, all requests in progress, and the
    /// last ones that have ended.
    pub fn recent_requests(&self, id: Option<RequestId>) -> pb::GetRequestsResponse {
        let state = self.state.lock();
        let requests = match id {
            Some(id) => state.recent.find(id).cloned().into_iter().collect(),
            None => state.recent.running_and_last(),
        };
        pb::GetRequestsResponse { requests, now_us: unix_us() }
    }
}

/// Time in microseconds since the Unix epoch.
pub(super) fn unix_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

#[cfg(test)]
mod tests;
