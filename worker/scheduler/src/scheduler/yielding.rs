//! Yielding: a running request of the largest share makes room for a share without a running request.
//!
//! Otherwise the first request of a share would wait until a request of a flood ends. When a flood has just arrived,
//! all of its running requests have just begun.

use std::collections::BTreeMap;

use tutti_proto::GraphKey;

use super::Scheduler;
use crate::{shares::ShareId, ticket::Ticket};

impl Scheduler {
    /// Lets the last plan's victim take part in steps again. Must be called before [`Self::grow`]: `grow` may mark the
    /// same request as a victim for this plan, and a later call would clear the mark.
    pub(super) fn end_yielding(&mut self) {
        if let Some(request) = self.yielding.take().and_then(|ticket| self.running.get_mut(&ticket)) {
            request.is_victim = false;
        }
    }

    /// Preempts one request if the share whose turn it is has no running request and cannot be admitted. Returns the
    /// preempted request. A victim with rows in flight is left out of this plan's step, and a later plan preempts it.
    pub(super) fn yield_to_share(&mut self) -> Option<GraphKey> {
        let ticket = self.share_without_running()?;
        if self.follows(ticket) || self.fits(ticket) {
            return None;
        }
        let victim = self.least_computed_of_largest_share()?;
        let request = self.running.get_mut(&victim)?;
        if request.is_in_flight() {
            request.is_victim = true;
            self.yielding = Some(victim);
            return None;
        }
        let request = self.running.remove(&victim)?;
        let not_computed = request.prefill_end().saturating_sub(request.computed());
        self.shares.take_back(request.share(), not_computed as u64);
        let mut request = request.preempt(&mut self.planes);
        request.has_yielded = true;
        let key = request.key;
        self.wait(victim, request);
        self.tally.preemptions += 1;
        Some(key)
    }

    /// The waiting request whose turn it is, if the request's share has no running request.
    fn share_without_running(&self) -> Option<Ticket> {
        if !self.shares.are_several() {
            return None;
        }
        let (share, ticket) = self.next_in_turn(&BTreeMap::new())?;
        self.running.values().all(|request| request.share() != share).then_some(ticket)
    }

    /// True if the request can be admitted. Pages that the prefix cache would save are not counted.
    fn fits(&self, ticket: Ticket) -> bool {
        let Some(request) = self.waiting.get(&ticket) else { return true };
        let needs = request.needs(self.config.settings.admission, self.planes.pages());
        needs.running <= self.config.max_running() - self.running.len()
            && needs.slots <= self.planes.slots().available()
            && needs.pages <= self.planes.pages().available()
    }

    /// The victim: of the share with the most running requests, at least two, the request with the fewest computed
    /// positions, so that the least is computed again. The youngest of several.
    fn least_computed_of_largest_share(&self) -> Option<Ticket> {
        let mut sizes = BTreeMap::<ShareId, usize>::new();
        for request in self.running.values() {
            *sizes.entry(request.share()).or_default() += 1;
        }
        let (&largest, &size) = sizes.iter().max_by_key(|(_, size)| **size)?;
        if size < 2 {
            return None;
        }
        let of_it =
            self.running.iter().filter(|(_, request)| request.share() == largest && request.may_yield());
        let (&victim, _) =
            of_it.min_by_key(|(ticket, request)| (request.planned(), std::cmp::Reverse(**ticket)))?;
        Some(victim)
    }
}
