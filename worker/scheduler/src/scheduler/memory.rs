//! Pages of requests: admission, growth, and preemption.

use std::ops::Bound;

use tutti_proto::GraphKey;

use super::Scheduler;
use crate::{
    request::{Running, Ticket},
    step::Reserved,
};

impl Scheduler {
    /// Gives a page to each request that needs one, in the order of tickets. If no page is available, the last request
    /// in that order is preempted. The first request is never preempted, so it ends, and then the next request is the
    /// first.
    pub(super) fn grow(&mut self) -> Vec<GraphKey> {
        let page_tokens = self.config.page_tokens;
        let short = |(ticket, request): (&Ticket, &Running)| {
            let settled = request.is_in_step() || request.is_disaggregated() || request.has_room(page_tokens);
            (!settled).then_some(*ticket)
        };
        let short: Vec<Ticket> = self.running.iter().filter_map(short).collect();
        let mut preempted = Vec::new();
        for ticket in short {
            while let Some(request) = self.running.get_mut(&ticket)
                && !request.grow(&mut self.pool)
            {
                let Some(victim) = self.victim(ticket) else { break };
                if let Some(request) = self.running.remove(&victim) {
                    let request = request.preempt(&mut self.pool);
                    preempted.push(request.key);
                    self.waiting.insert(victim, request);
                }
            }
        }
        self.tally.preemptions += preempted.len() as u64;
        preempted
    }

    /// The request to preempt so that the request of `ticket` gets a page: the last in order that is in no step and not
    /// pinned. If the request of `ticket` is the last in order, that request itself is preempted. None if all requests
    /// behind `ticket` are in a step or pinned. Then the request of `ticket` waits until others release pages.
    fn victim(&self, ticket: Ticket) -> Option<Ticket> {
        let (&last, _) = self.running.last_key_value()?;
        if last == ticket {
            return Some(ticket);
        }
        let mut behind = self.running.range((Bound::Excluded(ticket), Bound::Unbounded));
        let pinned = |request: &Running| request.is_in_step() || request.is_pinned();
        behind.rfind(|(_, request)| !pinned(request)).map(|(&victim, _)| victim)
    }

    /// Moves requests from waiting to running, strictly in order. The empty pool can hold the first waiting request, so
    /// that request waits only until enough running requests have ended. Returns the pages that were reserved for
    /// planes of other workers.
    pub(super) fn admit(&mut self) -> Vec<Reserved> {
        let slots = self.config.max_running();
        let mut reserved = Vec::new();
        while let Some(first) = self.waiting.first_entry() {
            let needs = first.get().needs(self.config.settings.admission, &self.pool);
            if needs.slots > slots - self.running.len() {
                break;
            }
            let Some(pages) = first.get().take_pages(needs.pages, &mut self.pool) else { break };
            let (ticket, request) = first.remove_entry();
            let prefill_tokens = request.prefill_end() as u64;
            let running = request.admit(pages, &self.pool);
            match running.reserved(&self.pool) {
                Some(room) => reserved.push(room),
                None => {
                    self.tally.prefill_tokens += prefill_tokens;
                    self.tally.cached_tokens += running.computed() as u64;
                }
            }
            self.running.insert(ticket, running);
        }
        reserved
    }
}
