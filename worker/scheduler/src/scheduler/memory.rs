//! Planes of requests: admission, growth, and preemption.

use std::{collections::BTreeMap, ops::Bound};

use tutti_proto::GraphKey;

use super::Scheduler;
use crate::{following::Following, request::Running, shares::ShareId, step::Reserved, ticket::Ticket};

impl Scheduler {
    /// Gives a page to each request that needs one, in the order of tickets. If no page is available, the last request
    /// in that order is preempted. The first request is never preempted, so it ends, and then the next request is the
    /// first.
    ///
    /// A request with rows in flight is not preempted yet, but it is left out of this plan's step. A later plan
    /// preempts it once its rows are committed, unless pages have become available by then.
    pub(super) fn grow(&mut self) -> Vec<GraphKey> {
        let page_tokens = self.config.page_tokens;
        let mut short = Vec::new();
        for (&ticket, request) in &mut self.running {
            request.is_victim = false;
            short.extend(request.is_short(page_tokens).then_some(ticket));
        }
        let mut preempted = Vec::new();
        for ticket in short {
            while let Some(request) = self.running.get_mut(&ticket)
                && !request.grow(&mut self.planes)
            {
                let Some(victim) = self.victim(ticket) else { break };
                let Some(mut request) = self.running.remove(&victim) else { break };
                if request.is_in_flight() {
                    request.is_victim = true;
                    self.running.insert(victim, request);
                    break;
                }
                let request = request.preempt(&mut self.planes);
                preempted.push(request.key);
                self.wait(victim, request);
            }
        }
        self.tally.preemptions += preempted.len() as u64;
        preempted
    }

    /// The request to preempt so that the request of `ticket` gets a page: the last in order that is not pinned. If the
    /// request of `ticket` is the last in order, that request itself is preempted. None if all requests behind `ticket`
    /// are pinned. Then the request of `ticket` waits until others release pages.
    fn victim(&self, ticket: Ticket) -> Option<Ticket> {
        let (&last, _) = self.running.last_key_value()?;
        if last == ticket {
            return Some(ticket);
        }
        let mut behind = self.running.range((Bound::Excluded(ticket), Bound::Unbounded));
        behind.rfind(|(_, request)| !request.is_pinned()).map(|(&victim, _)| victim)
    }

    /// Moves requests from waiting to running, in order within each share, except that requests that follow others are
    /// passed over. The empty pool can hold the request whose turn it is, so that request waits only until enough
    /// running requests have ended and their rows in flight are back. Returns the pages that were reserved for planes
    /// of other workers.
    pub(super) fn admit(&mut self) -> Vec<Reserved> {
        let most = self.config.max_running();
        let mut reserved = Vec::new();
        let mut passed = BTreeMap::new();
        while let Some((share, ticket)) = self.next_in_turn(&passed) {
            if self.follows(ticket) {
                passed.insert(share, ticket);
                continue;
            }
            let Some(next) = self.waiting.get(&ticket) else { break };
            let needs = next.needs(self.config.settings.admission, self.planes.pages());
            if needs.running > most - self.running.len() || needs.slots > self.planes.slots().available() {
                break;
            }
            let Some(planes) = next.take_planes(ticket.number, needs.pages, &mut self.planes) else { break };
            let Some(request) = self.waiting.remove(&ticket) else { break };
            let prefill_tokens = request.prefill_end() as u64;
            let running = request.admit(planes, &self.planes);
            match running.reserved(&self.planes) {
                Some(room) => reserved.push(room),
                None => {
                    self.tally.prefill_tokens += prefill_tokens;
                    self.tally.cached_tokens += running.planned() as u64;
                }
            }
            self.shares.admit(share, prefill_tokens.saturating_sub(running.planned() as u64));
            self.running.insert(ticket, running);
        }
        reserved
    }

    /// The waiting request whose turn it is: the first one of the share that was given least. Requests of a share up to
    /// the one in `passed` are left out.
    pub(super) fn next_in_turn(&self, passed: &BTreeMap<ShareId, Ticket>) -> Option<(ShareId, Ticket)> {
        self.waiting.firsts(passed).min_by_key(|&(share, ticket)| (self.shares.turn(share), ticket))
    }

    /// True if a waiting request follows a running one: the other one is about to compute blocks that both share.
    pub(super) fn follows(&mut self, ticket: Ticket) -> bool {
        let Some(request) = self.waiting.get_mut(&ticket) else { return false };
        if let Following::Leader { leader, until, blocks } = request.following {
            let leader = self.running.get(&leader);
            let reached = leader.is_some_and(|leader| leader.computed() >= until);
            if !reached && leader.is_some_and(Running::leads) {
                return true;
            }
            // The leader has ended, pauses, or has computed the shared blocks. Another running request may be about to
            // compute further blocks of this request.
            let in_vain = reached && request.blocks_to_skip(&self.planes) < blocks;
            request.following = if in_vain { Following::InVain } else { Following::Nobody };
        }
        if request.following == Following::Nobody
            && let Some(found) = request.find_leader(self.running.range(..ticket), &self.planes)
        {
            request.following = found;
        }
        matches!(request.following, Following::Leader { .. })
    }
}
