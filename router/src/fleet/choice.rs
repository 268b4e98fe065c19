//! Which conductor a request goes to: the one where it costs least, in blocks of tokens.
//!
//! `cost = uncached prompt blocks + (active decode blocks + queued prompt blocks) / workers`: what the request itself
//! has to compute there, and what each of its workers has to attend to and to compute before.

use std::cmp::Ordering;

/// What is known of a conductor's work.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Requests of this router that are under way there.
    pub requests: u64,
    /// Blocks of keys and values of requests that decode.
    pub active_blocks: u64,
    /// Prompt blocks yet to be computed of requests that have no token so far.
    pub queued_blocks: u64,
    /// Workers that share it; 0 counts as 1.
    pub workers: u32,
}

/// How good a place for a request a conductor is; only the best that there are come into question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// Ready, and requests succeed there.
    Good,
    /// Ready, as it says, but requests have failed there.
    Failing,
    /// Not ready when it was asked last.
    Unready,
}

/// A conductor that could take the request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Whether it is well.
    pub tier: Tier,
    /// What it has to do.
    pub load: Load,
    /// The request's prompt blocks that it holds.
    pub cached_blocks: usize,
    /// When it was picked last, as a count of picks.
    pub last_pick: u64,
}

impl Candidate {
    /// What a request of so many blocks costs there.
    pub fn cost(&self, prompt_blocks: usize) -> f64 {
        let uncached = prompt_blocks.saturating_sub(self.cached_blocks) as f64;
        let waiting = self.load.active_blocks.saturating_add(self.load.queued_blocks) as f64;
        uncached + waiting / f64::from(self.load.workers.max(1))
    }

    /// Of a better tier; then cheaper, with fewer requests, picked longer ago. Those that are not well are taken in turn,
    /// whatever they cost: so it is found soonest who is well again.
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

/// The place of the best candidate for a prompt of so many blocks; none of none.
pub fn choose(candidates: &[Candidate], prompt_blocks: usize) -> Option<usize> {
    let numbered = candidates.iter().enumerate();
    numbered.min_by(|(_, a), (_, b)| a.compare(b, prompt_blocks)).map(|(index, _)| index)
}

#[cfg(test)]
mod tests;
