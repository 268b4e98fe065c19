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
fn good_conductors_come_first_whatever_they_cost_and_the_others_take_turns() {
    let of = |tier, active, last_pick| Candidate { tier, last_pick, ..candidate(0, active, 0) };
    let (good, failing, unready) = (of(Tier::Good, 99, 9), of(Tier::Failing, 0, 5), of(Tier::Unready, 0, 0));
    assert_eq!(choose(&[unready, failing, good], 1), Some(2));
    assert_eq!(choose(&[unready, failing], 1), Some(1));
    assert_eq!(choose(&[failing, of(Tier::Failing, 99, 4)], 1), Some(1));
}

#[test]
fn equals_take_turns() {
    let mut all = [candidate(0, 0, 0); 3];
    for pick in 1..=9 {
        let index = choose(&all, 4).unwrap();
        assert_eq!(index as u64, (pick - 1) % 3);
        all[index].last_pick = pick;
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

    /// If prompts share no prefix, the numbers of requests on any two conductors differ by at most one.
    #[test]
    fn equal_requests_spread_evenly(members in 1usize..6, requests in 1usize..40, prompt in 1usize..9) {
        let mut all = vec![candidate(0, 0, 0); members];
        for pick in 1..=requests {
            let index = choose(&all, prompt).unwrap();
            let load = &mut all[index].load;
            load.requests += 1;
            load.queued_blocks += prompt as u64;
            all[index].last_pick = pick as u64;
        }
        let counts = all.iter().map(|c| c.load.requests);
        prop_assert!(counts.clone().max().unwrap() - counts.min().unwrap() <= 1);
    }
}
