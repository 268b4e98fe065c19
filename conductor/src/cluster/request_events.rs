//! Events of requests: submission, cancellation, expiry, reports, endings.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tutti_proto::{
    RequestId, WorkerId,
    cluster::v1::{self as pb, conductor_message::Message as ToWorker},
};
use tutti_runtime::{Error, ErrorKind};

use super::{Cluster, State, pace::Rule, prefixes};
use crate::{
    mailbox::{self, Ending},
    request::{Deadline, Dropped, Effects, GraphRole, NewRequest, Origin, Request, media},
    submission::Submission,
};

impl Cluster {
    /// Accepts and launches a request, or returns why the request is refused. The request fails `timeout_ms`
    /// milliseconds after its arrival; with `None`, the request has no deadline. Dropping the submission cancels the
    /// request. Must run inside a Tokio runtime.
    pub fn submit(
        self: &Arc<Self>,
        spec: pb::RequestSpec,
        timeout_ms: Option<u32>,
    ) -> Result<Submission, Error> {
        self.resume(spec, timeout_ms, Vec::new(), Origin::default())
    }

    /// Like [`Cluster::submit`], for a request that another conductor has begun. `generated` are the tokens generated
    /// so far, after which the output continues.
    pub fn resume(
        self: &Arc<Self>,
        spec: pb::RequestSpec,
        timeout_ms: Option<u32>,
        generated: Vec<u32>,
        origin: Origin,
    ) -> Result<Submission, Error> {
        let came = Instant::now();
        let accept = || {
            let deadline = timeout_ms.map(|timeout_ms| Deadline::new(came, timeout_ms)).transpose()?;
            let (id, output) = self.accept(spec, deadline, generated, origin)?;
            Ok(Submission::new(self.clone(), id, output, deadline))
        };
        accept().inspect_err(|error: &Error| self.metrics.refused(error.kind()))
    }

    fn accept(
        &self,
        spec: pb::RequestSpec,
        deadline: Option<Deadline>,
        generated: Vec<u32>,
        origin: Origin,
    ) -> Result<(RequestId, mailbox::Receiver), Error> {
        // The lock is held only to read the model. The rest of this function may take long: a prompt may be long, and
        // the secret is read from the system's random number generator.
        let model = self.state.lock().membership.model_view()?;
        let mut spec = spec.check(&generated, &model.description.request_limits())?;
        let encoders = media::check(&spec, &model.declaration)?;
        self.digest.of(spec.media_mut(), &model.declaration);
        // All media of one kind have the same placeholder tokens. Prompts with different media may therefore have equal
        // tokens, so prompts with media are not compared.
        let comparable = model.has_choice && !self.limits.engine.no_prefix_cache && encoders.is_empty();
        let pieces = if comparable {
            prefixes::cut(&spec, &model.description)
        } else {
            prefixes::uncut(&spec.prompt, &model.description)
        };
        let reservation = self.new_reservation(&encoders)?;
        let prompt_tokens = spec.prompt.len();
        let (output, receiver) = mailbox::channel(&self.unread);
        let mut state = self.state.lock();
        state.membership.check_admission(&encoders, state.requests.len())?;
        let id = state.requests.mint_id();
        let request = Request::accept(NewRequest {
            id,
            spec,
            deadline,
            walks: model.walks,
            encoders,
            reservation,
            pieces,
            generated,
            max_replays: self.limits.faults.max_replays,
            output,
            origin,
        });
        state.recent.accepted(id, prompt_tokens, request.request_id());
        state.requests.insert(id, request);
        self.metrics.accepted(prompt_tokens, state.requests.len());
        self.in_flight.send_replace(state.requests.len());
        self.launch(&mut state, id);
        Ok((id, receiver))
    }

    /// Cancels a request whose client has gone. Does nothing once the request has ended.
    pub fn cancel(&self, id: RequestId) {
        self.end_early(id, Ending::Cancelled);
    }

    /// Ends a request for an operator, with an error for the client. `accepted_us` is the time at which the request was
    /// accepted; 0 ends any request of this id.
    pub fn cancel_for_operator(&self, id: RequestId, accepted_us: u64) -> Result<(), Error> {
        let mut state = self.state.lock();
        let is_meant = accepted_us == 0 || state.recent.accepted_us(id) == Some(accepted_us);
        let Some(request) = state.requests.get_mut(id).filter(|request| is_meant && request.is_live()) else {
            return Err(Error::new(ErrorKind::NotFound, format!("request {id} is not in progress")));
        };
        let error = Error::new(ErrorKind::Cancelled, "an operator has cancelled the request");
        let client = request.request_id().to_owned();
        let effects = request.end_early(Ending::Failed(error));
        self.apply(&mut state, id, effects);
        tracing::info!(request = id.0, request_id = client, "an operator has cancelled the request");
        Ok(())
    }

    /// Fails a request whose deadline has passed.
    pub(crate) fn expire(&self, id: RequestId, deadline: Deadline) {
        self.end_early(id, Ending::Failed(deadline.error()));
    }

    fn end_early(&self, id: RequestId, ending: Ending) {
        let mut state = self.state.lock();
        let Some(request) = state.requests.get_mut(id) else { return };
        let effects = request.end_early(ending);
        self.apply(&mut state, id, effects);
    }

    /// Handles the report of one step of a worker.
    pub fn on_report(&self, from: WorkerId, report: pb::StepReport) {
        let state = &mut *self.state.lock();
        let now = state.membership.workers.now();
        let Some(worker) = state.membership.workers.hear(from) else { return self.drop_late(report) };
        worker.stuck = Duration::ZERO;
        worker.steps.take(&report, &Rule::of(&self.limits.faults), now);
        for row in &report.prefills {
            self.note_prefill(state, from, RequestId(row.request));
        }
        let Some(worker) = state.membership.workers.get_mut(from) else { return };
        self.metrics.expert_loads(worker.rank, &report.expert_loads);
        if let Some(load) = report.load {
            worker.load = load;
            self.metrics.load(worker.rank, &load);
            if let Some(work) = &report.work {
                self.metrics.step(worker.rank, worker.walk_name(report.batch_walk), work);
                state.recent.step(worker.rank, report.step, work, report.prefills, Instant::now());
            }
        }
        // Rows are handled before completions, since the token count of a completion includes the tokens of the same
        // step.
        for row in report.rows {
            self.on_row(state, from, row);
        }
        for completion in report.completions {
            self.on_completion(state, from, completion);
        }
    }

    /// Records that a request's prefill has been in a step of a worker.
    fn note_prefill(&self, state: &mut State, from: WorkerId, id: RequestId) {
        if let Some(request) = state.requests.get_mut(id) {
            for role in [GraphRole::Whole, GraphRole::Prefill] {
                state.membership.workers.begin(from, request.key(role));
            }
        }
    }

    /// Counts the tokens and completions of a fenced worker's report as dropped. The worker's requests have already
    /// started over.
    fn drop_late(&self, report: pb::StepReport) {
        self.metrics.tokens(0, report.rows.iter().map(|row| row.tokens.len()).sum());
        report.completions.iter().for_each(|_| self.metrics.dropped(Dropped::Stale));
    }

    fn on_row(&self, state: &mut State, from: WorkerId, row: pb::RowReport) {
        let id = RequestId(row.key.map_or(0, |key| key.request));
        let Some(request) = state.requests.get_mut(id) else {
            self.metrics.tokens(0, row.tokens.len());
            return;
        };
        let key = row.key;
        let outcome = request.on_row(from, row);
        self.metrics.tokens(outcome.taken, outcome.dropped);
        if let Some(key) = key.filter(|_| outcome.taken > 0) {
            state.recent.generated(id, outcome.taken);
            state.membership.workers.set_decoding(from, key.into(), request.blocks());
        }
        self.apply(state, id, outcome.effects);
    }

    fn on_completion(&self, state: &mut State, from: WorkerId, completion: pb::Completion) {
        let id = RequestId(completion.key.map_or(0, |key| key.request));
        match state.requests.get_mut(id) {
            Some(request) => {
                let effects = request.on_completion(from, completion);
                self.apply(state, id, effects);
            }
            None => self.metrics.dropped(state.requests.why_unknown(id)),
        }
    }

    pub(super) fn fail(&self, state: &mut State, ids: Vec<RequestId>, error: &Error) {
        for id in ids {
            if let Some(request) = state.requests.get_mut(id) {
                let effects = request.end_early(Ending::Failed(error.clone()));
                self.apply(state, id, effects);
            }
        }
    }

    /// Places waiting requests, the oldest first. Called whenever a worker may have gained room.
    pub(super) fn place_waiting(&self, state: &mut State) {
        for id in state.requests.take_waiting() {
            self.launch(state, id);
        }
    }

    /// Carries out the effects of an event on a request.
    pub(super) fn apply(&self, state: &mut State, id: RequestId, effects: Effects) {
        let workers = &mut state.membership.workers;
        for (worker, key) in effects.cancel {
            workers.send(worker, ToWorker::Cancel(pb::CancelGraph { key: Some(key.into()) }));
        }
        let mut room = false;
        for (worker, key) in effects.released {
            room |= workers.release(worker, key);
        }
        for (worker, key) in effects.begun {
            workers.activate(worker, key);
        }
        if effects.handed_over {
            self.metrics.handed_over();
            state.recent.handed_over(id);
        }
        if let Some(why) = effects.dropped {
            self.metrics.dropped(why);
        }
        if effects.replayed {
            self.metrics.replayed();
            state.recent.replayed(id);
        }
        if let Some(kind) = effects.ended {
            self.metrics.ended(kind);
            state.recent.ended(id, kind, &effects.cause);
            state.requests.stop_waiting(id);
        }
        if state.requests.remove_if_over(id) {
            self.metrics.in_flight(state.requests.len());
            self.in_flight.send_replace(state.requests.len());
        }
        if effects.needs_placement {
            self.launch(state, id);
        }
        if room && state.requests.any_waiting() {
            self.place_waiting(state);
        }
    }
}
