//! Endings between steps: cancelled requests, failed transfers, and deadlines.

use std::time::Duration;

use tutti_proto::GraphKey;

use super::Scheduler;
use crate::{
    launch::GraphRole,
    request::{Request, Running},
    shares::ShareId,
    step::{Ending, Outcome},
    ticket::Ticket,
};

impl Scheduler {
    /// Ends requests that are cancelled, past their deadline or certain to miss it, or whose transfer failed. A request
    /// with rows in flight ends too: those rows are void, and its planes are held until the last of these rows is back.
    pub(super) fn expire(&mut self, now: Duration) -> Vec<Ending> {
        let mut endings = Vec::new();
        for key in std::mem::take(&mut self.cancelled) {
            endings.extend(self.end(key, Outcome::Cancelled));
        }
        for (key, why) in std::mem::take(&mut self.failed_transfers) {
            endings.extend(self.end(key, Outcome::TransferFailed(why)));
        }
        for (key, end) in std::mem::take(&mut self.constrained) {
            endings.extend(self.end_constrained(key, end));
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
                endings.extend(self.end(key, Outcome::DeadlineExceeded));
            } else if needed > left {
                endings.extend(self.end(key, Outcome::DeadlineUnreachable { needed, left }));
            }
        }
        endings
    }

    /// Lower bound on the time until a request's next token, even if the request ran alone from now on. Cached prefixes
    /// are counted only if the bound would otherwise exceed `left`.
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
        if needed <= left || !request.update_known_tokens(self.planes.pages()) {
            return needed;
        }
        // Rows in flight and imports may still record a prefix that this request can share. `recorded` is the largest
        // number of tokens that such a prefix can have.
        let recorded = self.running.values().map(Running::tokens_to_record).max().unwrap_or(0);
        request.least_time(request.known_tokens.max(recorded), chunk, known)
    }

    /// Ends a request. None if it is not held.
    pub(super) fn end(&mut self, key: GraphKey, outcome: Outcome) -> Option<Ending> {
        let ticket = *self.tickets.get(&key)?;
        let Some(request) = self.waiting.remove(&ticket).or_else(|| self.parked.remove(&ticket)) else {
            return self.end_running(ticket, key, outcome);
        };
        self.forget(key, request.share, request.deadline);
        Some(request.end(outcome))
    }

    /// Ends a running request. Its planes are freed, at the latest when its last row in flight is back.
    pub(super) fn end_running(&mut self, ticket: Ticket, key: GraphKey, outcome: Outcome) -> Option<Ending> {
        let request = self.running.remove(&ticket)?;
        self.forget(key, request.share(), request.deadline());
        let (ending, draining) = request.end(outcome, &mut self.planes);
        self.draining.extend(draining.map(|draining| (ticket, draining)));
        Some(ending)
    }

    /// Removes an ended request from the indexes of held requests.
    fn forget(&mut self, key: GraphKey, share: ShareId, deadline: Option<Duration>) {
        self.tickets.remove(&key);
        self.shares.leave(share);
        if let Some(deadline) = deadline {
            self.deadlines.remove(&(deadline, key));
        }
    }
}
