//! Slow workers: a worker whose steps take far longer than those of its peers gets no new requests for a while, and the
//! requests that wait there and have not begun move to others.
//!
//! Peers run the same part of requests on devices of the same description. The last worker of a role is never set
//! aside, and neither is one whose peers are as slow. A slow worker is a last resort to placement and not a dead one:
//! if all others die or drain, it gets requests again.

use std::time::{Duration, Instant};

use tutti_proto::{GraphKey, RequestId, WorkerId};

use super::{
    Cluster, State,
    pace::{self, Medians, Rule},
    placement::PlacementQuery,
    roles::GroupRole,
    workers::{Worker, Workers},
};

/// Time for which the oldest request of a worker has been in no step yet, after which an idle worker takes it.
const WAITED_MS: u32 = 1_000;

/// Time for which a worker must be slow before it is set aside, so that a burst of other work on its machine is not
/// enough.
const SUSTAINED: Duration = Duration::from_secs(3);

/// A worker that is set aside because it is slow.
#[derive(Clone, Copy, Debug)]
pub struct SetAside {
    /// Number of times that its steps took as long as those of its peers.
    pub pace: f64,
    /// Time until it is tried again.
    pub left: Duration,
}

impl SetAside {
    /// Description for operators.
    pub fn describe(&self) -> String {
        let Self { pace, left } = self;
        let left = left.as_secs();
        format!(
            "slow: its steps take at least {pace:.1} times as long as those of its peers; tried again in {left} s"
        )
    }
}

impl Cluster {
    /// Compares the workers, `time` after the previous time. Sets slow ones aside, and tries those again whose pause is
    /// over.
    pub(super) fn judge_paces(&self, state: &mut State, time: Duration) {
        let rule = Rule::of(&self.limits.faults);
        let workers = &mut state.membership.workers;
        for (_, worker) in workers.iter_mut() {
            let Some(aside) = &mut worker.set_aside else { continue };
            aside.left = aside.left.saturating_sub(time);
            if aside.left.is_zero() {
                worker.set_aside = None;
                worker.steps.clear();
                tracing::info!(worker = %worker.rank, "the slow worker is tried again");
                self.metrics.slow(worker.rank, false);
            }
        }
        let mut slow = workers.compare(&rule, Instant::now());
        slow.sort_by(|(_, one), (_, other)| other.total_cmp(one));
        for (id, worker) in workers.iter_mut() {
            let is_slow = slow.iter().any(|(slow, _)| *slow == id);
            worker.slow_for = if is_slow { worker.slow_for + time } else { Duration::ZERO };
        }
        for (id, pace) in slow {
            let is_due = workers.get(id).is_some_and(|worker| worker.slow_for >= SUSTAINED);
            if !is_due || !workers.can_do_without(id) {
                continue;
            }
            let Some(worker) = workers.get_mut(id) else { continue };
            let aside = SetAside { pace, left: self.limits.faults.slow_worker_pause() };
            worker.set_aside = Some(aside);
            tracing::warn!(worker = %worker.rank, why = aside.describe(), "the worker gets no new requests");
            self.metrics.slow(worker.rank, true);
        }
        for (_, worker) in workers.iter() {
            self.metrics.pace(worker.rank, worker.cost_percent as f64 / 100.0);
        }
    }

    /// Moves requests that wait at a worker and have not begun to workers that are free.
    pub(super) fn move_waiting(&self, state: &mut State) {
        while let Some(id) = self.next_to_move(state) {
            let Some(request) = state.requests.get_mut(id) else { return };
            let effects = request.move_on();
            self.metrics.moved();
            self.apply(state, id, effects);
        }
    }

    /// The oldest request that another worker could begin at once.
    fn next_to_move(&self, state: &State) -> Option<RequestId> {
        let workers = &state.membership.workers;
        let limit = self.limits.engine.running_limit();
        let from: Vec<WorkerId> =
            workers.ready().filter_map(|(id, _)| workers.must_give(id, limit)).collect();
        if from.is_empty() {
            return None;
        }
        state.requests.iter().find_map(|(id, request)| {
            let (at, key) = request.waits_at()?;
            if !from.contains(&at) || workers.has_begun(at, key) {
                return None;
            }
            let cached = state.prefixes.cached(request, Instant::now());
            let query = PlacementQuery::new(request, &cached, &self.limits);
            let placement = if workers.duties_of(at).include(GroupRole::Prefill) {
                workers.place_prefill(&query)
            } else {
                workers.place_request(&query)
            };
            let to = *placement?.members.values().next()?;
            (to != at && workers.is_free(to, limit)).then_some(id)
        })
    }
}

impl Workers {
    /// Updates the costs of all ready workers by their pace beside all workers of the same duties. Returns the workers
    /// that are slow beside their peers and not set aside yet, with their paces.
    fn compare(&mut self, rule: &Rule, now: Instant) -> Vec<(WorkerId, f64)> {
        let medians: Vec<(WorkerId, Medians)> =
            self.ready().map(|(id, worker)| (id, worker.steps.medians(now))).collect();
        let mut found = Vec::new();
        let mut costs = Vec::new();
        for (id, worker) in self.ready() {
            let like = |other: &Worker| self.duties(other.rank) == self.duties(worker.rank);
            let pace_beside = |is_peer: &dyn Fn(&Worker) -> bool| {
                let peers = medians.iter().filter(|(other, _)| {
                    *other != id && self.get(*other).is_some_and(|other| like(other) && is_peer(other))
                });
                worker.steps.pace(peers.map(|(_, medians)| medians), rule, now)
            };
            costs.push((id, pace::cost_percent(pace_beside(&|_| true))));
            let pace = pace_beside(&|other| other.device == worker.device);
            found.extend(pace.filter(|pace| rule.is_slow(*pace)).map(|pace| (id, pace)));
        }
        for (id, percent) in costs {
            if let Some(worker) = self.get_mut(id) {
                worker.cost_percent = percent;
            }
        }
        found.retain(|(id, _)| self.get(*id).is_some_and(|worker| worker.set_aside.is_none()));
        found
    }

    /// True if each role of a worker has another ready worker that is not set aside.
    fn can_do_without(&self, id: WorkerId) -> bool {
        let duties = self.duties_of(id);
        GroupRole::ALL
            .into_iter()
            .filter(|role| duties.include(*role))
            .all(|role| self.ready_for(role).any(|(other, worker)| other != id && worker.set_aside.is_none()))
    }

    /// The worker, if requests wait there that others should begin: it is set aside, it holds more requests than it
    /// runs, or its oldest request has waited long beside an idle worker.
    fn must_give(&self, id: WorkerId, limit: usize) -> Option<WorkerId> {
        let worker = self.get(id)?;
        let is_over = worker.booked.requests > worker.running_limit(limit) as u64;
        let waits = worker.load.oldest_waiting_ms >= WAITED_MS
            && self.ready().any(|(_, other)| other.booked.requests == 0);
        (worker.set_aside.is_some() || is_over || waits).then_some(id)
    }

    /// True if a worker runs a further request at once.
    fn is_free(&self, id: WorkerId, limit: usize) -> bool {
        self.get(id).is_some_and(|worker| {
            let has_room = worker.booked.requests < worker.running_limit(limit) as u64;
            has_room && worker.set_aside.is_none() && worker.load.oldest_waiting_ms < WAITED_MS
        })
    }

    /// True if a graph has been in a step of its worker, or is not there.
    fn has_begun(&self, id: WorkerId, key: GraphKey) -> bool {
        self.get(id).is_none_or(|worker| worker.has_begun(key))
    }
}
