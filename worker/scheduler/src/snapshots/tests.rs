use super::*;

#[test]
fn rungs_are_powers_of_two_from_four_blocks_on_or_end_the_prefill() {
    let ladder = Ladder::new(4 * 29, 4);
    let rungs: Vec<usize> = (0..200).filter(|&position| ladder.has(position)).collect();
    assert_eq!(rungs, [4, 8, 16, 28, 32].map(|blocks| 4 * blocks));
}

#[test]
fn the_next_rung_is_the_first_behind_the_position() {
    for prefill in 1..300 {
        let ladder = Ladder::new(prefill, 3);
        for from in 0..300 {
            let next = (from + 1..).find(|&position| ladder.has(position)).unwrap();
            assert_eq!(ladder.next(from), next, "behind {from} in {prefill}");
        }
    }
}

#[test]
fn the_last_rung_leaves_a_token_to_compute() {
    assert!(!Ladder::new(20, 4).has(20) && Ladder::new(20, 4).has(16));
    assert!(Ladder::new(21, 4).has(20));
}
