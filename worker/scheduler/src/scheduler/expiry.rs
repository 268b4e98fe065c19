//! Endings between steps: cancelled requests, failed transfers, and deadlines.

use std::{
    collections::{BTreeSet, HashMap, btree_map::Entry},
    time::Duration,
};

use tutti_proto::GraphKey;

use super::Scheduler;
use crate::{
    launch::GraphRole,
    request::{Request, Running, Ticket},
    step::{Ending, Outcome},
};

impl Scheduler {
    /// Ends requests that are cancelled, late or certain to be late, or whose transfer failed. A request inside a step
    /// keeps its pages until the step returns, so it is ended by a later call.
    pub(super) fn expire(&mut self, now: Duration) -> Vec<Ending> {
        let mut endings = Vec::new();
        for key in std::mem::take(&mut self.cancelled) {
            if !self.end(key, Outcome::Cancelled, &mut endings) {
                self.cancelled.insert(key);
            }
        }
        for (key, why) in std::mem::take(&mut self.failed_transfers) {
            if !self.end(key, Outcome::TransferFailed(why.clone()), &mut endings) {
                self.failed_transfers.insert(key, why);
            }
        }
        // Only deadlines up to `near` are checked, because every later deadline leaves more time than the bound for the
        // longest possible prefill.
        let near = now + self.least_time.of_any(self.config.max_context, self.config.max_chunk());
        let near: Vec<_> =
            self.deadlines.iter().take_while(|(deadline, _)| *deadline <= near).copied().collect();
        for (deadline, key) in near {
            let left = deadline.saturating_sub(now);
            let needed = self.least_time_needed(key, left);
            if left.is_zero() {
                self.end(key, Outcome::DeadlineExceeded, &mut endings);
            } else if needed > left {
                self.end(key, Outcome::DeadlineUnreachable { needed, left }, &mut endings);
            }
        }
        endings
    }

    /// Lower bound on the time until a request's next token if the request ran alone from now on. Cached prefixes are
    /// counted only if the bound would otherwise exceed `left`.
    fn least_time_needed(&mut self, key: GraphKey, left: Duration) -> Duration {
        let Some(ticket) = self.tickets.get(&key) else { return Duration::ZERO };
        let (known, chunk) = (&self.least_time, self.config.max_chunk());
        if let Some(request) = self.running.get(ticket) {
            return if request.awaits_planes() { Duration::ZERO } else { request.least_time(chunk, known) };
        }
        // The time of another worker's prefill is not known here, so the bound is zero for a request that another
        // worker prefills.
        let prefilled_here = |request: &&mut Request| request.role != GraphRole::Decode;
        let Some(request) = self.waiting.get_mut(ticket).filter(prefilled_here) else {
            return Duration::ZERO;
        };
        let needed = request.least_time(request.known_tokens, chunk, known);
        // A lookup in the prefix cache takes time, so it is made only if the bound without it exceeds the time left.
        if needed <= left || !request.look_up(&self.pool) {
            return needed;
        }
        if self.running.values().any(Running::is_in_step) {
            // A step that runs now may be computing a prefix that the request can share, so there is no bound before it
            // returns.
            return Duration::ZERO;
        }
        request.least_time(request.known_tokens, chunk, known)
    }

    /// Ends a request, if it is held. False, without effect, if the request is inside a step.
    fn end(&mut self, key: GraphKey, outcome: Outcome, endings: &mut Vec<Ending>) -> bool {
        let Some(&ticket) = self.tickets.get(&key) else { return true };
        let waiting = self.waiting.remove(&ticket).or_else(|| self.parked.remove(&ticket));
        let (deadline, ending) = if let Some(request) = waiting {
            (request.deadline, request.end(outcome))
        } else if let Entry::Occupied(request) = self.running.entry(ticket)
            && !request.get().is_in_step()
        {
            let request = request.remove();
            (request.deadline(), request.end(outcome, &mut self.pool))
        } else {
            return false;
        };
        forget(&mut self.tickets, &mut self.deadlines, key, deadline);
        endings.push(ending);
        true
    }
}

/// Removes an ended request from the indexes of held requests.
pub(super) fn forget(
    tickets: &mut HashMap<GraphKey, Ticket>,
    deadlines: &mut BTreeSet<(Duration, GraphKey)>,
    key: GraphKey,
    deadline: Option<Duration>,
) {
    tickets.remove(&key);
    if let Some(deadline) = deadline {
        deadlines.remove(&(deadline, key));
    }
}
