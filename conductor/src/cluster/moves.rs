//! Moves: requests that wait at a worker and have not begun go to workers that are free.

use std::{collections::BTreeMap, time::Instant};

use tutti_proto::{RequestId, WorkerId};

use super::{
    Cluster, State,
    placement::{Placement, PlacementQuery},
    standing::Turn,
    workers::Workers,
};
use crate::request::Waiting;

/// Time for which the oldest request of a worker has been in no step yet, after which an idle worker takes it.
const WAITED_MS: u32 = 1_000;
/// Number of requests for which the watchdog seeks another worker at a time, because it holds the lock that every
/// request takes.
const SOUGHT: usize = 64;

impl Cluster {
    /// Moves requests that wait at a worker and have not begun to workers that are free.
    pub(super) fn move_waiting(&self, state: &mut State) {
        let limit = self.limits.engine.running_limit();
        for id in state.waiting_elsewhere(limit).into_iter().take(SOUGHT) {
            if !state.membership.workers.any_free(limit) {
                return;
            }
            if !self.begins_sooner_elsewhere(state, id, limit) {
                continue;
            }
            let Some(request) = state.requests.get_mut(id) else { continue };
            let effects = request.move_on();
            self.metrics.moved();
            self.apply(state, id, effects);
        }
    }

    /// True if placement would choose another worker for a request that waits, and that worker would begin it at once.
    fn begins_sooner_elsewhere(&self, state: &State, id: RequestId, limit: usize) -> bool {
        let workers = &state.membership.workers;
        let found = state.requests.get(id).and_then(|request| Some((request, request.waiting()?)));
        let Some((request, waiting)) = found else { return false };
        let cached = state.prefixes.cached(request, Instant::now());
        let query = PlacementQuery::new(request, &cached, &self.limits);
        let leader = |placement: Option<Placement>| placement?.members.into_values().next();
        let is_free = |leader: WorkerId| workers.is_free(leader, limit);
        let Some(first) = leader(workers.place_request(&query)) else { return false };
        match waiting.decode {
            None => first != waiting.leader && is_free(first),
            Some(decode) if workers.is_aside(decode) => first != decode && is_free(first),
            Some(decode) => {
                // The prefill waits. The room for the decode is given back, and may be reserved again.
                let prefill = leader(workers.place_prefill(&query));
                let begins = prefill.is_some_and(|prefill| prefill != waiting.leader && is_free(prefill));
                begins && (first == decode || is_free(first))
            }
        }
    }
}

impl State {
    /// Requests that another worker should begin, if one is free: those of the lowest priority number and then the
    /// oldest come first.
    fn waiting_elsewhere(&self, limit: usize) -> Vec<RequestId> {
        let workers = &self.membership.workers;
        if !workers.any_free(limit) {
            return Vec::new();
        }
        let is_any_idle = workers.ready().any(|(_, other)| other.bookings.sum().requests == 0);
        let mut spared: BTreeMap<WorkerId, usize> = workers
            .ready()
            .filter_map(|(id, _)| Some((id, workers.spares(id, limit, is_any_idle)?)))
            .collect();
        if spared.is_empty() && !workers.any_aside() {
            return Vec::new();
        }
        let mut waiting: Vec<(i32, RequestId, Waiting)> = self
            .requests
            .iter()
            .filter_map(|(id, request)| Some((request, id, request.waiting()?)))
            .filter(|(.., waiting)| !workers.has_begun(waiting.leader, waiting.key))
            .map(|(request, id, waiting)| (request.spec().priority, id, waiting))
            .collect();
        waiting.sort_unstable_by_key(|(priority, id, _)| (*priority, *id));
        waiting.retain(|(_, _, waiting)| {
            // The worker is about to begin the first ones itself.
            let waits = spared.get_mut(&waiting.leader).is_some_and(|spared| match spared.checked_sub(1) {
                None => true,
                Some(fewer) => {
                    *spared = fewer;
                    false
                }
            });
            waits || waiting.decode.is_some_and(|decode| workers.is_aside(decode))
        });
        waiting.into_iter().map(|(_, id, _)| id).collect()
    }
}

impl Workers {
    /// Number of requests that have not begun and that a worker is nevertheless about to begin itself. `None` unless
    /// further requests wait there that others should begin: the worker is set aside, it holds more requests than it
    /// runs, or its oldest request has waited long beside an idle worker.
    fn spares(&self, id: WorkerId, limit: usize, is_any_idle: bool) -> Option<usize> {
        let worker = self.get(id)?;
        let limit = worker.running_limit(limit);
        let is_over = worker.bookings.sum().requests > limit as u64;
        let waits = worker.load.oldest_waiting_ms >= WAITED_MS && is_any_idle;
        let runs = match worker.record.is_aside() || waits {
            true => worker.load.running as usize,
            false if is_over => limit,
            false => return None,
        };
        Some(runs.saturating_sub(worker.bookings.begun()))
    }

    /// True if a worker begins a further request at once.
    fn is_free(&self, id: WorkerId, limit: usize) -> bool {
        self.get(id).is_some_and(|worker| {
            let held = worker.bookings.sum().requests;
            let has_room = held < worker.running_limit(limit) as u64;
            has_room && worker.record.turn(held) == Turn::Usual && worker.load.oldest_waiting_ms < WAITED_MS
        })
    }

    fn any_free(&self, limit: usize) -> bool {
        self.ready().any(|(id, _)| self.is_free(id, limit))
    }

    fn any_aside(&self) -> bool {
        self.ready().any(|(_, worker)| worker.record.is_aside())
    }

    fn is_aside(&self, id: WorkerId) -> bool {
        self.get(id).is_some_and(|worker| worker.record.is_aside())
    }
}
