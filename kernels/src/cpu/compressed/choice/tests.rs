use super::*;
use crate::cpu::testing::Random;

#[test]
fn candidates_order_by_score_and_then_by_index() {
    let ordered = [
        (f32::INFINITY, 9),
        (3.0, 2),
        (3.0, 7),
        (1e-40, 1),
        (0.0, 4),
        (-0.0, 5),
        (0.0, 6),
        (-1e-40, 0),
        (-2.0, 3),
        (f32::NEG_INFINITY, 8),
    ];
    let candidates = ordered.map(|(score, index)| candidate(score, index));
    assert!(candidates.windows(2).all(|pair| pair[0] > pair[1]), "{candidates:?}");
    assert_eq!(candidates.map(index_of), ordered.map(|(_, index)| index as u32));
}

/// The best candidates do not depend on the order in which candidates are added, or on how many are dropped at once.
#[test]
fn the_best_are_those_of_a_sorted_list() {
    let mut random = Random::new(1);
    for top_k in [1, 2, 5, 32] {
        for count in [top_k, top_k + 1, 2 * top_k, 2 * top_k + 1, 300] {
            // Many scores are equal.
            let mut all: Vec<u64> =
                (0..count).map(|index| candidate(random.below(7) as f32 - 3.0, index)).collect();
            let mut held = vec![0; 2 * top_k];
            let mut best = Best::new(&mut held, top_k, 0);
            all.iter().for_each(|&candidate| best.add(candidate));
            best.shrink();
            let mut got = best.held[..best.count].to_vec();
            got.sort_unstable_by(|a, b| b.cmp(a));
            all.sort_unstable_by(|a, b| b.cmp(a));
            assert_eq!(got, all[..top_k.min(count)], "{top_k} of {count}");
        }
    }
}
