//! The cluster's requests: admission, launches, reports, endings.

use std::{sync::Arc, time::Instant};

use tutti_proto::{
    RequestId, WorkerId,
    cluster::v1::{self as pb, conductor_message::Message as ToWorker},
};
use tutti_runtime::Error;

use super::{Cluster, RETRY_AFTER, State, workers::Booking};
use crate::{
    mailbox::{self, Ending},
    request::{Deadline, Dropped, Effects, Request, door},
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
        let came = Instant::now();
        let accept = || {
            let deadline = timeout_ms.map(|timeout_ms| Deadline::new(came, timeout_ms)).transpose()?;
            let (id, output) = self.accept(spec, deadline)?;
            Ok(Submission::new(self.clone(), id, output, deadline))
        };
        accept().inspect_err(|error: &Error| self.metrics.refused(error.kind()))
    }

    fn accept(
        &self,
        spec: pb::RequestSpec,
        deadline: Option<Deadline>,
    ) -> Result<(RequestId, mailbox::Receiver), Error> {
        // Outside the lock: a prompt may be long.
        door::check(&spec, &*self.model()?)?;
        let mut state = self.state.lock();
        self.check_admission(&state)?;
        let graphs = state.model.as_ref().map(|model| model.graphs.clone()).unwrap_or_default();
        state.next_request += 1;
        let id = RequestId(state.next_request);
        let (output, receiver) = mailbox::channel();
        let prompt_tokens = spec.prompt.len();
        state.requests.insert(id, Request::accept(id, spec, deadline, graphs, output));
        self.metrics.accepted(prompt_tokens, state.requests.len());
        self.in_flight.send_replace(state.requests.len());
        self.launch(&mut state, id);
        Ok((id, receiver))
    }

    fn check_admission(&self, state: &State) -> Result<(), Error> {
        let ready = state.workers.ready().count();
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
        if let (Some(load), Some(worker)) = (report.load, state.workers.get_mut(from)) {
            self.metrics.load(worker.rank, &load);
            worker.load = load;
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

    fn on_row(&self, state: &mut State, from: WorkerId, row: pb::RowReport) {
        let id = RequestId(row.key.map_or(0, |key| key.request));
        let Some(request) = state.requests.get_mut(&id) else {
            self.metrics.tokens(0, row.tokens.len());
            return;
        };
        let outcome = request.on_row(from, row);
        self.metrics.tokens(outcome.taken, outcome.dropped);
        self.apply(state, id, outcome.effects);
    }

    fn on_completion(&self, state: &mut State, from: WorkerId, completion: pb::Completion) {
        let id = RequestId(completion.key.map_or(0, |key| key.request));
        match state.requests.get_mut(&id) {
            Some(request) => {
                let effects = request.on_completion(from, completion);
                self.apply(state, id, effects);
            }
            // Ids are minted in order: one at or below the newest was a request of ours, and it is over.
            None if (1..=state.next_request).contains(&id.0) => self.metrics.dropped(Dropped::Stale),
            None => self.metrics.dropped(Dropped::Unknown),
        }
    }

    pub(super) fn fail_requests_of(&self, state: &mut State, worker: WorkerId, why: &str) {
        let ids: Vec<RequestId> = state.requests.keys().copied().collect();
        for id in ids {
            if let Some(request) = state.requests.get_mut(&id) {
                let effects = request.on_worker_lost(worker, why);
                self.apply(state, id, effects);
            }
        }
    }

    pub(super) fn fail_all(&self, state: &mut State, why: &str) {
        let ids: Vec<RequestId> = state.requests.keys().copied().collect();
        for id in ids {
            if let Some(request) = state.requests.get_mut(&id) {
                let effects = request.end_early(Ending::Failed(Error::unavailable(why)));
                self.apply(state, id, effects);
            }
        }
    }

    /// Sends the request's next graph to a worker, or fails it where there is none.
    fn launch(&self, state: &mut State, id: RequestId) {
        let placement = state.workers.place();
        let Some(request) = state.requests.get_mut(&id) else { return };
        let Some(placement) = placement else {
            let error = Error::unavailable("no worker is ready to go on with the request");
            let effects = request.end_early(Ending::Failed(error));
            return self.apply(state, id, effects);
        };
        let booking = Booking::of(request.spec());
        let mut workers: Vec<WorkerId> = placement.values().copied().collect();
        let Some(launch) = request.launch(placement, Instant::now()) else { return };
        // The last one takes the message itself: most graphs have one worker, and prompts may be long.
        let last = workers.pop();
        for worker in workers {
            state.workers.book(worker, booking);
            state.workers.send(worker, ToWorker::Launch(launch.clone()));
        }
        if let Some(worker) = last {
            state.workers.book(worker, booking);
            state.workers.send(worker, ToWorker::Launch(launch));
        }
    }

    fn apply(&self, state: &mut State, id: RequestId, effects: Effects) {
        let Some(request) = state.requests.get(&id) else { return };
        let key = request.key();
        let (booking, over) = (Booking::of(request.spec()), request.is_over());
        for worker in effects.cancel {
            state.workers.send(worker, ToWorker::Cancel(pb::CancelGraph { key: Some(key.into()) }));
        }
        for worker in effects.released {
            state.workers.release(worker, booking);
        }
        if let Some(why) = effects.dropped {
            self.metrics.dropped(why);
        }
        if let Some(kind) = effects.ended {
            self.metrics.ended(kind);
        }
        if over {
            state.requests.remove(&id);
            self.metrics.in_flight(state.requests.len());
            self.in_flight.send_replace(state.requests.len());
        }
        if effects.place {
            self.launch(state, id);
        }
    }
}
