use super::*;

const BEGIN: u32 = 1;
const END: u32 = 2;

fn behind(begin: Option<u32>, max_tokens: u32, tokens: &[u32]) -> Option<u32> {
    let thinking = pb::Thinking { begin, end: END, max_tokens: Some(max_tokens) };
    let mut budget = ThinkingBudget::of(&thinking).unwrap();
    tokens.iter().for_each(|&token| budget.commit(token));
    budget.closes_with()
}

#[test]
fn the_block_is_closed_at_its_limit() {
    assert_eq!(behind(None, 2, &[9]), None);
    assert_eq!(behind(None, 2, &[9, 9]), Some(END));
    assert_eq!(behind(None, 2, &[9, 9, END]), None);
    assert_eq!(behind(None, 0, &[]), Some(END));
    // The limit holds on, should another token have come.
    assert_eq!(behind(None, 2, &[9, 9, 9]), Some(END));
}

#[test]
fn only_the_block_counts() {
    assert_eq!(behind(Some(BEGIN), 1, &[]), None);
    assert_eq!(behind(Some(BEGIN), 1, &[BEGIN]), None);
    assert_eq!(behind(Some(BEGIN), 1, &[BEGIN, 9]), Some(END));
    assert_eq!(behind(Some(BEGIN), 1, &[9, BEGIN, 9, 9]), None);
    assert_eq!(behind(Some(BEGIN), 1, &[BEGIN, END, BEGIN, 9, 9]), None);
}

#[test]
fn a_block_without_a_limit_has_no_budget() {
    assert_eq!(ThinkingBudget::of(&pb::Thinking { begin: None, end: END, max_tokens: None }), None);
}
