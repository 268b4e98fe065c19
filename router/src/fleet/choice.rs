//! Selects the conductor for a request: the conductor with the lowest cost. The unit of cost is a block of tokens.
//!
//! `cost = uncached prompt blocks + (active decode blocks + queued prompt blocks) / workers`. The first term is the
//! request's own prefill. The second term is the work that each of the conductor's workers already has.

use std::cmp::Ordering;

/// The load of a conductor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Unfinished requests that this router has sent to the conductor.
    pub requests: u64,
    /// KV blocks of decoding requests.
    pub active_blocks: u64,
    /// Prompt blocks still to be computed for requests that have no output token yet.
    pub queued_blocks: u64,
    /// Number of workers that share the load; 0 counts as 1.
    pub workers: u32,
}

/// Suitability of a conductor, best tier first. A request goes to a conductor of the best tier among the candidates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// The conductor reports that it is ready, and its circuit breaker lets a request pass.
    Good,
    /// The conductor reports that it is ready, but its circuit breaker lets no request pass, since requests have
    /// failed.
    Failing,
    /// The conductor was not ready at its last poll, or did not answer the poll.
    Unready,
}

/// A conductor that could take the request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The conductor's tier.
    pub tier: Tier,
    /// The conductor's load.
    pub load: Load,
    /// Number of the request's prompt blocks that the conductor has cached, by the router's prefix index.
    pub cached_blocks: usize,
    /// Serial number of the last pick that chose the conductor; 0 before the first such pick.
    pub last_pick: u64,
}

impl Candidate {
    /// Cost of a request with this many prompt blocks.
    pub fn cost(&self, prompt_blocks: usize) -> f64 {
        let uncached = prompt_blocks.saturating_sub(self.cached_blocks) as f64;
        let waiting = self.load.active_blocks.saturating_add(self.load.queued_blocks) as f64;
        uncached + waiting / f64::from(self.load.workers.max(1))
    }

    /// Orders by tier, then by cost, number of requests, and time of the last pick. Conductors below `Tier::Good` are
    /// picked in turn, regardless of cost, so that the router soon finds a conductor that has recovered.
    fn compare(&self, other: &Self, prompt_blocks: usize) -> Ordering {
        let by_turn = self.last_pick.cmp(&other.last_pick);
        match self.tier.cmp(&other.tier) {
            Ordering::Equal if self.tier != Tier::Good => by_turn,
            Ordering::Equal => {
                let by_cost = self.cost(prompt_blocks).total_cmp(&other.cost(prompt_blocks));
                by_cost.then(self.load.requests.cmp(&other.load.requests)).then(by_turn)
            }
            by_tier => by_tier,
        }
    }
}

/// Index of the best candidate for a prompt of this many blocks; `None` if there is no candidate.
pub fn choose(candidates: &[Candidate], prompt_blocks: usize) -> Option<usize> {
    let numbered = candidates.iter().enumerate();
    numbered.min_by(|(_, a), (_, b)| a.compare(b, prompt_blocks)).map(|(index, _)| index)
}

#[cfg(test)]
mod tests;
