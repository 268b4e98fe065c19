use proptest::prelude::*;

use super::*;

const NOBODY: Share = Share::WITHOUT_KEY;

fn key(name: &str) -> Share {
    Share::of_key(name)
}

#[test]
fn an_oversized_request_leaves_a_quarter_to_the_others() {
    let mut bound = Bound::default();
    let oversized = bound.enter(1024, NOBODY, 1024).unwrap();
    assert!(bound.enter(1024, NOBODY, 1024).is_none() && bound.enter(1024, NOBODY, 129).is_none());
    let others: Vec<_> = (0..256).map(|_| bound.enter(1024, NOBODY, 1).unwrap()).collect();
    assert!(bound.enter(1024, NOBODY, 1).is_none());
    bound.leave(oversized);
    others.into_iter().for_each(|held| bound.leave(held));
    assert_eq!(bound.held(), 0);
}

#[test]
fn large_requests_together_leave_a_quarter() {
    let mut bound = Bound::default();
    let _large: Vec<_> = (0..5).map(|_| bound.enter(1024, NOBODY, 150).unwrap()).collect();
    assert!(bound.enter(1024, NOBODY, 150).is_none());
    let _small = bound.enter(1024, NOBODY, 128).unwrap();
}

#[test]
fn without_keys_small_requests_take_all() {
    for limit in [1, 2, 3, 100] {
        let mut bound = Bound::default();
        let _held: Vec<_> = (0..limit).map(|_| bound.enter(limit, NOBODY, 1).unwrap()).collect();
        assert!(bound.enter(limit, NOBODY, 1).is_none());
    }
}

#[test]
fn a_flood_of_one_key_leaves_room_for_others() {
    let mut bound = Bound::default();
    let flood = |bound: &mut Bound, share| std::iter::from_fn(|| bound.enter(1024, share, 1)).count();
    assert_eq!(flood(&mut bound, key("a")), 768);
    assert_eq!(flood(&mut bound, key("b")), 192);
    assert_eq!(flood(&mut bound, key("c")), 48);
    assert_eq!(flood(&mut bound, key("d")), 12);
    assert!(bound.enter(1024, key("e"), 1).is_some());
    let mut one = Bound::default();
    assert_eq!(flood_of(&mut one, 1), 1, "a bound of one has no room to leave");
}

fn flood_of(bound: &mut Bound, limit: u64) -> usize {
    std::iter::from_fn(|| bound.enter(limit, key("a"), 1)).count()
}

proptest! {
    #[test]
    fn the_bound_holds_and_everything_is_given_back(
        limit in 1_u64..2000,
        calls in proptest::collection::vec((0_u64..4, 0_u64..1500, any::<bool>()), 1..200),
    ) {
        let shares = [NOBODY, key("a"), key("b"), key("c")];
        let (mut bound, mut all) = (Bound::default(), Vec::new());
        for (caller, amount, leaves) in calls {
            if leaves && !all.is_empty() {
                bound.leave(all.swap_remove(amount as usize % all.len()));
            } else {
                all.extend(bound.enter(limit, shares[caller as usize], amount));
            }
            prop_assert!(bound.held() <= limit);
            prop_assert!(bound.large <= limit - limit / 4);
            prop_assert_eq!(bound.held(), all.iter().map(|held| held.amount).sum::<u64>());
        }
        all.into_iter().for_each(|held| bound.leave(held));
        prop_assert_eq!((bound.held(), bound.large, bound.by_key.len()), (0, 0, 0));
    }
}
