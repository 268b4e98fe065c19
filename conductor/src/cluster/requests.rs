//! The cluster's requests: admission, launches, reports, endings.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tutti_proto::{
    RequestId, WorkerId,
    cluster::v1::{self as pb, conductor_message::Message as ToWorker},
};
use tutti_runtime::Error;

use super::{Cluster, RETRY_AFTER, State, prefixes, roles::GroupRole, workers::Worker};
use crate::{
    mailbox::{self, Ending},
    request::{Deadline, Dropped, Effects, Request, media, validate},
    submission::Submission,
};

impl Cluster {
    /// Accepts a request that has so many milliseconds from now, and launches it, or says why not. Dropping the submission
    /// cancels it. Must run inside a Tokio runtime.
    pub fn submit(
        self: &Arc<Self>,
        spec: pb::RequestSpec,
        timeout_ms: Option<u32>,
    ) -> Result<Submission, Error> {
        self.resume(spec, timeout_ms, Vec::new())
    }

    /// As [`Cluster::submit`], for a request that has had this output elsewhere: it goes on behind it.
    pub fn resume(
        self: &Arc<Self>,
        spec: pb::RequestSpec,
        timeout_ms: Option<u32>,
        generated: Vec<u32>,
    ) -> Result<Submission, Error> {
        let came = Instant::now();
        let accept = || {
            let deadline = timeout_ms.map(|timeout_ms| Deadline::new(came, timeout_ms)).transpose()?;
            let (id, output) = self.accept(spec, deadline, generated)?;
            Ok(Submission::new(self.clone(), id, output, deadline))
        };
        accept().inspect_err(|error: &Error| self.metrics.refused(error.kind()))
    }

    fn accept(
        &self,
        mut spec: pb::RequestSpec,
        deadline: Option<Deadline>,
        generated: Vec<u32>,
    ) -> Result<(RequestId, mailbox::Receiver), Error> {
        // Outside the lock: a prompt may be long, and a secret is read from a file.
        let (model, declaration, choice) = self.model_and_choice()?;
        validate::check_spec(&spec, &model)?;
        validate::check_generated(&generated, &spec, &model)?;
        let encoders = media::check(&spec, &declaration)?;
        self.digest.of(&mut spec.media);
        // What stands behind its placeholders is not in the prompt.
        let comparable = choice && self.limits.prefix_cache && encoders.is_empty();
        let pieces = prefixes::cut(&spec.prompt, &model, comparable);
        let reservation = self.new_reservation(!encoders.is_empty())?;
        let mut state = self.state.lock();
        self.check_admission(&state, !encoders.is_empty())?;
        let Some(walks) = state.model.as_ref().map(|model| model.walks) else {
            return Err(Error::unavailable(self.why_not_ready(&state)));
        };
        state.next_request += 1;
        let id = RequestId(state.next_request);
        let (output, receiver) = mailbox::channel();
        let prompt_tokens = spec.prompt.len();
        let request =
            Request::accept(id, spec, deadline, walks, reservation, self.limits.max_replays, output);
        let request = request.behind(generated).cut_into(pieces).encoded_by(encoders);
        state.requests.insert(id, request);
        self.metrics.accepted(prompt_tokens, state.requests.len());
        self.in_flight.send_replace(state.requests.len());
        self.launch(&mut state, id);
        Ok((id, receiver))
    }

    /// Replicas that decode what others prefill, where there is one that does.
    fn disaggregated_replicas(&self, state: &State) -> usize {
        let decode = state.workers.ready_for(GroupRole::Decode).count();
        if state.workers.ready_for(GroupRole::Prefill).next().is_some() { decode } else { 0 }
    }

    fn check_admission(&self, state: &State, has_media: bool) -> Result<(), Error> {
        let mut ready =
            state.workers.ready_for(GroupRole::Whole).count() + self.disaggregated_replicas(state);
        if has_media && state.workers.ready_for(GroupRole::Encode).next().is_none() {
            ready = 0;
        }
        if state.draining || ready == 0 {
            return Err(Error::unavailable(self.why_not_ready(state)));
        }
        let limit =
            self.limits.max_running_requests as usize * ready + self.limits.max_queued_requests as usize;
        let in_flight = state.requests.len();
        if in_flight >= limit {
            let message = format!("{in_flight} requests are in flight, the limit is {limit}");
            return Err(Error::overloaded(message, RETRY_AFTER));
        }
        Ok(())
    }

    /// The client has gone: frees what the request holds. No-op once it has ended.
    pub fn cancel(&self, id: RequestId) {
        self.end_early(id, Ending::Cancelled);
    }

    /// The request's deadline has passed.
    pub(crate) fn expire(&self, id: RequestId, deadline: Deadline) {
        self.end_early(id, Ending::Failed(deadline.error()));
    }

    fn end_early(&self, id: RequestId, ending: Ending) {
        let mut state = self.state.lock();
        let Some(request) = state.requests.get_mut(&id) else { return };
        let effects = request.end_early(ending);
        self.apply(&mut state, id, effects);
    }

    /// Takes all that one step of a worker brought.
    pub fn on_report(&self, from: WorkerId, report: pb::StepReport) {
        let mut state = self.state.lock();
        let Some(worker) = state.workers.hear(from) else { return self.drop_late(report) };
        worker.stuck = Duration::ZERO;
        if let Some(load) = report.load {
            worker.load = load;
            self.metrics.load(worker.rank, &load);
            if let Some(work) = &report.work {
                self.metrics.step(worker.rank, worker.walk_name(report.batch_walk), work);
            }
        }
        // Rows before completions: a completion counts the tokens of its own step.
        for row in report.rows {
            self.on_row(&mut state, from, row);
        }
        for completion in report.completions {
            self.on_completion(&mut state, from, completion);
        }
    }

    /// Of a worker that was taken for dead: what it held has gone elsewhere.
    fn drop_late(&self, report: pb::StepReport) {
        self.metrics.tokens(0, report.rows.iter().map(|row| row.tokens.len()).sum());
        report.completions.iter().for_each(|_| self.metrics.dropped(Dropped::Stale));
    }

    fn on_row(&self, state: &mut State, from: WorkerId, row: pb::RowReport) {
        let id = RequestId(row.key.map_or(0, |key| key.request));
        let Some(request) = state.requests.get_mut(&id) else {
            self.metrics.tokens(0, row.tokens.len());
            return;
        };
        let key = row.key;
        let outcome = request.on_row(from, row);
        self.metrics.tokens(outcome.taken, outcome.dropped);
        if let Some(key) = key.filter(|_| outcome.taken > 0) {
            state.workers.decodes(from, key.into(), request.blocks());
        }
        self.apply(state, id, outcome.effects);
    }

    fn on_completion(&self, state: &mut State, from: WorkerId, completion: pb::Completion) {
        let id = RequestId(completion.key.map_or(0, |key| key.request));
        match state.requests.get_mut(&id) {
            Some(request) => {
                let effects = request.on_completion(from, completion);
                self.apply(state, id, effects);
            }
            None => self.metrics.dropped(self.why_unknown(state, id)),
        }
    }

    /// A worker is gone: its requests start over elsewhere, or wait for a worker to be ready.
    pub(super) fn replay_requests_of(&self, state: &mut State, id: WorkerId, lost: &Worker, why: &str) {
        for request in lost.requests() {
            if let Some(held) = state.requests.get_mut(&request) {
                let effects = held.on_worker_lost(id, why);
                self.apply(state, request, effects);
            }
        }
    }

    pub(super) fn fail_all(&self, state: &mut State, why: &str) {
        let ids: Vec<RequestId> = state.requests.keys().copied().collect();
        self.fail(state, ids, &Error::unavailable(why));
    }

    /// Fails those of the requests that wait for a place for which none is to be hoped for.
    pub(super) fn fail_waiting(&self, state: &mut State, why: &str, hopeless: impl Fn(&Request) -> bool) {
        let waiting = state.waiting.iter().copied();
        let ids = waiting.filter(|id| state.requests.get(id).is_some_and(&hopeless));
        let ids: Vec<RequestId> = ids.collect();
        let error = Error::unavailable(format!("the request lost its worker, and there is no other: {why}"));
        self.fail(state, ids, &error);
    }

    fn fail(&self, state: &mut State, ids: Vec<RequestId>, error: &Error) {
        for id in ids {
            if let Some(request) = state.requests.get_mut(&id) {
                let effects = request.end_early(Ending::Failed(error.clone()));
                self.apply(state, id, effects);
            }
        }
    }

    /// Gives places to those that wait for one, the oldest first. To be called when there may be more places.
    pub(super) fn place_waiting(&self, state: &mut State) {
        for id in std::mem::take(&mut state.waiting) {
            self.launch(state, id);
        }
    }

    pub(super) fn apply(&self, state: &mut State, id: RequestId, effects: Effects) {
        for (worker, key) in effects.cancel {
            state.workers.send(worker, ToWorker::Cancel(pb::CancelGraph { key: Some(key.into()) }));
        }
        let mut room = false;
        for (worker, key) in effects.released {
            room |= state.workers.release(worker, key);
        }
        for (worker, key) in effects.begun {
            state.workers.wake(worker, key);
        }
        if effects.handed_over {
            self.metrics.handed_over();
        }
        if let Some(why) = effects.dropped {
            self.metrics.dropped(why);
        }
        if effects.replayed {
            self.metrics.replayed();
        }
        if let Some(kind) = effects.ended {
            self.metrics.ended(kind);
            state.waiting.remove(&id);
        }
        if state.requests.get(&id).is_some_and(Request::is_over) {
            state.requests.remove(&id);
            self.metrics.in_flight(state.requests.len());
            self.in_flight.send_replace(state.requests.len());
        }
        if effects.needs_placement {
            self.launch(state, id);
        }
        if room && !state.waiting.is_empty() {
            self.place_waiting(state);
        }
    }
}
