use std::ops::Range;

use super::*;

fn chosen(logits: &[f32], top_k: usize, renormalise: bool) -> Vec<Choice> {
    let mut choices = vec![Choice::default(); top_k];
    choose(logits, renormalise, &mut choices);
    choices
}

fn experts(choices: &[Choice]) -> Vec<u32> {
    choices.iter().map(|choice| choice.expert).collect()
}

#[test]
fn the_largest_logits_win_and_of_equal_ones_the_first() {
    assert_eq!(experts(&chosen(&[0.0, 3.0, -1.0, 2.0], 2, false)), [1, 3]);
    assert_eq!(experts(&chosen(&[1.0, 1.0, 1.0, 1.0], 3, false)), [0, 1, 2]);
    assert_eq!(experts(&chosen(&[0.0, 1.0, 2.0, 1.0, 1.0], 3, false)), [2, 1, 3]);
    assert_eq!(experts(&chosen(&[-0.0, 0.0, f32::NEG_INFINITY], 1, false)), [0]);
    assert_eq!(experts(&chosen(&[5.0, 4.0], 2, false)), [0, 1]);
}

#[test]
fn weights_are_the_softmax_over_all_experts_or_over_the_chosen() {
    let logits = [0.5f32, 2.0, -1.0, 1.0];
    let all: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
    for (choice, logit) in chosen(&logits, 2, false).iter().zip([2.0f64, 1.0]) {
        assert!((f64::from(choice.weight) - logit.exp() / all).abs() < 1e-6, "{choice:?}");
    }
    let both = 2f64.exp() + 1f64.exp();
    for (choice, logit) in chosen(&logits, 2, true).iter().zip([2.0f64, 1.0]) {
        assert!((f64::from(choice.weight) - logit.exp() / both).abs() < 1e-6, "{choice:?}");
    }
    // Large logits do not overflow.
    assert_eq!(chosen(&[1e30, 0.0], 1, false)[0].weight, 1.0);
}

#[test]
fn a_row_whose_logits_are_not_finite_has_weights_that_are_nan_and_experts_that_exist() {
    for bad in [f32::NAN, f32::INFINITY] {
        for at in 0..3 {
            let mut logits = [1.0, 2.0, 3.0];
            logits[at] = bad;
            let choices = chosen(&logits, 2, true);
            assert!(choices.iter().all(|choice| choice.weight.is_nan() && choice.expert < 3), "{choices:?}");
            let mut experts = experts(&choices);
            experts.dedup();
            assert_eq!(experts.len(), 2);
        }
    }
}

#[test]
fn rows_are_sorted_by_expert_and_then_by_row() {
    let mut pool = ThreadPool::new(2).unwrap();
    let mut routes = Routes::default();
    let logits = [[0.0, 9.0, 8.0, 1.0], [7.0, 0.0, 8.0, 1.0], [0.0, 9.0, 1.0, 2.0]].concat();
    routes.route(&mut pool, &logits, 4, Routing { top_k: 2, renormalise: true }).unwrap();
    let mut grouped = |experts: Range<usize>, most| {
        let (end, groups, rows) = routes.group(experts, most);
        let groups: Vec<_> = groups.iter().map(|group| (group.matrix, group.rows)).collect();
        (end, groups, rows.iter().map(|routed| routed.row).collect::<Vec<_>>())
    };
    let all = (4, vec![(0, (0, 1)), (1, (1, 3)), (2, (3, 5)), (3, (5, 6))], vec![1, 0, 2, 0, 1, 2]);
    assert_eq!(grouped(0..4, 6), all);
    assert_eq!(grouped(0..4, 4), (2, vec![(0, (0, 1)), (1, (1, 3))], vec![1, 0, 2]));
    assert_eq!(grouped(2..4, 3), (4, vec![(0, (0, 2)), (1, (2, 3))], vec![0, 1, 2]));
    assert_eq!(grouped(3..4, 3), (4, vec![(0, (0, 1))], vec![2]));
    let mut totals = vec![10; 4];
    routes.count(&mut totals);
    assert_eq!(totals, [11, 12, 12, 11]);
}

#[test]
fn experts_without_rows_have_no_group() {
    let mut pool = ThreadPool::new(1).unwrap();
    let mut routes = Routes::default();
    let logits = [0.0, 9.0, 1.0, 8.0, 2.0];
    routes.route(&mut pool, &logits, 5, Routing { top_k: 2, renormalise: true }).unwrap();
    let (end, groups, rows) = routes.group(0..5, 2);
    let groups: Vec<_> = groups.iter().map(|group| group.matrix).collect();
    assert_eq!((end, groups, rows.len()), (5, vec![1, 3], 2));
    let (end, groups, rows) = routes.group(4..5, 2);
    assert_eq!((end, groups.len(), rows.len()), (5, 0, 0));
}
