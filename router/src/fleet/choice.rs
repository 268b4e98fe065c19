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
    numbered.min_by(|(_, a), (_, b)| a.compare(b, prompt_blocks)).map(|(place, _)| place)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidate(cached_blocks: usize, active_blocks: u64, queued_blocks: u64) -> Candidate {
        let load = Load { requests: 0, active_blocks, queued_blocks, workers: 1 };
        Candidate { tier: Tier::Good, load, cached_blocks, last_pick: 0 }
    }

    #[test]
    fn a_held_prefix_wins_until_its_holder_is_busier_by_more() {
        let prompt = 10;
        assert_eq!(choose(&[candidate(0, 0, 0), candidate(8, 7, 0)], prompt), Some(1));
        assert_eq!(choose(&[candidate(0, 0, 0), candidate(8, 9, 0)], prompt), Some(0));
        assert_eq!(choose(&[candidate(0, 0, 0), candidate(8, 4, 5)], prompt), Some(0));
        assert_eq!(choose(&[], prompt), None);
    }

    #[test]
    fn work_is_shared_by_workers_and_a_prompt_is_not() {
        let mut big = candidate(0, 8, 8);
        big.load.workers = 4;
        assert_eq!(big.cost(5), 5.0 + 4.0);
        big.load.workers = 0;
        assert_eq!(big.cost(5), 5.0 + 16.0);
    }

    #[test]
    fn the_well_come_first_whatever_they_cost_and_the_others_take_turns() {
        let of = |tier, active, last_pick| Candidate { tier, last_pick, ..candidate(0, active, 0) };
        let (good, failing, unready) =
            (of(Tier::Good, 99, 9), of(Tier::Failing, 0, 5), of(Tier::Unready, 0, 0));
        assert_eq!(choose(&[unready, failing, good], 1), Some(2));
        assert_eq!(choose(&[unready, failing], 1), Some(1));
        assert_eq!(choose(&[failing, of(Tier::Failing, 99, 4)], 1), Some(1));
    }

    #[test]
    fn equals_take_turns() {
        let mut all = [candidate(0, 0, 0); 3];
        for pick in 1..=9 {
            let place = choose(&all, 4).unwrap();
            assert_eq!(place as u64, (pick - 1) % 3);
            all[place].last_pick = pick;
        }
    }

    proptest! {
        #[test]
        fn no_other_candidate_costs_less(
            all in prop::collection::vec((0usize..20, 0u64..20, 0u64..20, 0u32..4, 0u64..3), 1..8),
            prompt in 0usize..20,
        ) {
            let all: Vec<_> = all
                .into_iter()
                .map(|(cached, active, queued, workers, requests)| {
                    let mut one = candidate(cached, active, queued);
                    one.load = Load { workers, requests, ..one.load };
                    one
                })
                .collect();
            let chosen = all[choose(&all, prompt).unwrap()];
            for other in &all {
                prop_assert!(chosen.cost(prompt) <= other.cost(prompt));
                if chosen.cost(prompt) == other.cost(prompt) {
                    prop_assert!(chosen.load.requests <= other.load.requests);
                }
            }
        }

        /// Where prompts share nothing, no conductor gets more than one request more than another.
        #[test]
        fn requests_alike_spread_evenly(members in 1usize..6, requests in 1usize..40, prompt in 1usize..9) {
            let mut all = vec![candidate(0, 0, 0); members];
            for pick in 1..=requests {
                let place = choose(&all, prompt).unwrap();
                let load = &mut all[place].load;
                load.requests += 1;
                load.queued_blocks += prompt as u64;
                all[place].last_pick = pick as u64;
            }
            let counts = all.iter().map(|c| c.load.requests);
            prop_assert!(counts.clone().max().unwrap() - counts.min().unwrap() <= 1);
        }
    }
}
