use std::ops::Range;

use super::*;

fn chosen(logits: &[f32], top_k: usize, renormalise: bool) -> Vec<Choice> {
    chosen_by(logits, Routing { renormalise, ..Routing::softmax(top_k) }, RowChoice::Largest(None))
}

/// The choices of the row with index 0.
fn chosen_by(logits: &[f32], routing: Routing, choice: RowChoice<'_>) -> Vec<Choice> {
    let mut choices = vec![Choice::default(); routing.top_k];
    Router { routing, choice, experts: logits.len() }.choose(0, logits, &mut choices);
    choices
}

/// Returns the router of the largest logits.
fn router(experts: usize) -> Router<'static> {
    let routing = Routing { renormalise: true, ..Routing::softmax(2) };
    Router { routing, choice: RowChoice::Largest(None), experts }
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

const SOFTPLUS: Routing = Routing { top_k: 2, score: Score::SqrtSoftplus, renormalise: true, scale: 1.5 };

/// The weight of each logit in a row of [`SOFTPLUS`] whose experts have these logits.
fn softplus_weights(logits: [f32; 2]) -> [f64; 2] {
    let scores = logits.map(|logit| f64::from(logit).exp().ln_1p().sqrt());
    scores.map(|score| 1.5 * score / (scores[0] + scores[1]))
}

fn has_weights(choices: &[Choice], want: [f64; 2]) {
    for (choice, want) in choices.iter().zip(want) {
        assert!((f64::from(choice.weight) - want).abs() < 1e-6, "{choices:?} {want}");
    }
}

#[test]
fn a_bias_changes_the_choice_and_no_weight() {
    let logits = [0.5, 2.0, -1.0, 25.0];
    let plain = chosen_by(&logits, SOFTPLUS, RowChoice::Largest(None));
    assert_eq!(experts(&plain), [3, 1]);
    has_weights(&plain, softplus_weights([25.0, 2.0]));
    let bias = [0.0, -1.0, 4.0, 0.0];
    let biased = chosen_by(&logits, SOFTPLUS, RowChoice::Largest(Some(&bias)));
    assert_eq!(experts(&biased), [3, 2]);
    has_weights(&biased, softplus_weights([25.0, -1.0]));
    // The scores of very small logits are 0, and so are the weights.
    let none = chosen_by(&[-1e4; 3], SOFTPLUS, RowChoice::Largest(None));
    assert!(experts(&none) == [0, 1] && none.iter().all(|choice| choice.weight == 0.0), "{none:?}");
}

#[test]
fn a_table_chooses_the_experts_of_a_token_and_the_logits_their_weights() {
    let (logits, table, token_ids) = ([0.5, 2.0, -1.0, 1.0], [0.0, 1.0, 2.0, 0.0, 1.0, 3.0], [1, 7]);
    let choice = RowChoice::ByToken { table: &table, token_ids: &token_ids };
    let listed = chosen_by(&logits, SOFTPLUS, choice);
    assert_eq!(experts(&listed), [2, 0]);
    has_weights(&listed, softplus_weights([-1.0, 0.5]));
    let check = |experts, rows| Router { routing: SOFTPLUS, choice, experts }.check(rows);
    assert_eq!(check(3, 1), Ok(()));
    for (experts, rows, words) in [(2, 1, "of token 1, of 2"), (4, 2, "of token 7")] {
        let error = check(experts, rows).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_row_that_is_not_finite_has_weights_that_are_nan_with_each_score() {
    for bad in [f32::NAN, f32::INFINITY] {
        // The bias keeps the bad expert out of the choice.
        let (logits, bias) = ([bad, 2.0, 3.0], [f32::NEG_INFINITY, 0.0, 0.0]);
        let choices = chosen_by(&logits, SOFTPLUS, RowChoice::Largest(Some(&bias)));
        assert!(choices.iter().all(|choice| choice.weight.is_nan() && choice.expert < 3), "{choices:?}");
    }
}

#[test]
fn rows_are_sorted_by_expert_and_then_by_row() {
    let mut pool = ThreadPool::new(2).unwrap();
    let mut routes = Routes::default();
    let logits = [[0.0, 9.0, 8.0, 1.0], [7.0, 0.0, 8.0, 1.0], [0.0, 9.0, 1.0, 2.0]].concat();
    routes.route(&mut pool, &logits, &router(4)).unwrap();
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
    routes.route(&mut pool, &logits, &router(5)).unwrap();
    let (end, groups, rows) = routes.group(0..5, 2);
    let groups: Vec<_> = groups.iter().map(|group| group.matrix).collect();
    assert_eq!((end, groups, rows.len()), (5, vec![1, 3], 2));
    let (end, groups, rows) = routes.group(4..5, 2);
    assert_eq!((end, groups.len(), rows.len()), (5, 0, 0));
}
