use super::*;

fn of(tokens: u32) -> TokenLimit {
    TokenLimit { tokens, what: "a test" }
}

#[test]
fn the_limit_is_exact_to_the_token() {
    let asked = |max_tokens| Stopping { max_tokens, ..Stopping::default() };
    let max_tokens = |stopping: &Stopping, prompt, limit| max_tokens(stopping, prompt, of(limit));
    assert_eq!(max_tokens(&asked(Some(6)), 10, 16), Ok(6));
    assert_eq!(max_tokens(&asked(Some(7)), 10, 16).unwrap_err().field(), Some("max_tokens"));
    assert_eq!(max_tokens(&asked(None), 10, 16), Ok(6));
    assert_eq!(max_tokens(&asked(None), 16, 16).unwrap_err().field(), Some("prompt"));
    assert_eq!(max_tokens(&asked(Some(0)), 16, 16), Ok(0));
    assert_eq!(max_tokens(&asked(None), 17, 16).unwrap_err().field(), Some("prompt"));
}

#[test]
fn the_default_of_max_tokens_shrinks_to_the_limit() {
    let stopping = Stopping { default_max_tokens: Some(16), ..Stopping::default() };
    assert_eq!(max_tokens(&stopping, 10, of(16)), Ok(6));
    assert_eq!(max_tokens(&stopping, 10, of(100)), Ok(16));
}

#[test]
fn every_choice_has_its_own_seed() {
    assert_eq!(choice_seed(42, 0), 42);
    let seeds: std::collections::HashSet<u64> = (0..128).map(|i| choice_seed(42, i)).collect();
    assert_eq!(seeds.len(), 128);
    assert_ne!(choice_seed(42, 1), choice_seed(43, 1));
}
