use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

fn key(number: usize) -> Share {
    Share::of_key(&format!("key-{number}"))
}

#[test]
fn items_of_one_share_keep_their_order() {
    let mut queue = FairQueue::new(10);
    (0..100).for_each(|item| queue.push(Share::WITHOUT_KEY, item % 50, item));
    let items: Vec<u64> = std::iter::from_fn(|| queue.pop()).collect();
    assert_eq!(items, (0..100).collect::<Vec<_>>());
}

#[test]
fn one_item_waits_for_one_quantum_of_a_flood() {
    let mut queue = FairQueue::new(10);
    (0..500).for_each(|_| queue.push(key(0), 5, "flood"));
    assert_eq!(queue.pop(), Some("flood"));
    queue.push(key(1), 5, "one");
    let ahead = std::iter::from_fn(|| queue.pop()).position(|item| item == "one");
    assert!(ahead.is_some_and(|ahead| ahead <= 2), "{ahead:?}");
}

proptest! {
    /// While two shares have waiting items, their served costs differ by at most two quanta and two of the largest
    /// items.
    #[test]
    fn shares_with_items_get_equal_costs(
        quantum in 1_u64..50,
        costs in proptest::collection::vec((0_usize..4, 0_u64..100), 1..300),
    ) {
        let mut queue = FairQueue::new(quantum);
        let mut waiting = HashMap::<usize, usize>::new();
        for (index, &(share, cost)) in costs.iter().enumerate() {
            queue.push(key(share), cost, index);
            *waiting.entry(share).or_default() += 1;
        }
        let (mut given, mut taken) = (HashMap::<usize, u64>::new(), 0);
        while let Some(index) = queue.pop() {
            let (share, cost) = costs[index];
            *given.entry(share).or_default() += cost;
            *waiting.get_mut(&share).unwrap() -= 1;
            taken += 1;
            let backlogged: Vec<u64> = waiting.iter().filter(|(_, left)| **left > 0)
                .map(|(share, _)| given.get(share).copied().unwrap_or(0)).collect();
            if let (Some(least), Some(most)) = (backlogged.iter().min(), backlogged.iter().max()) {
                prop_assert!(most - least <= 2 * quantum + 2 * 100, "{least} and {most}");
            }
        }
        prop_assert_eq!(taken, costs.len());
    }
}
