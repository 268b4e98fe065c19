use super::*;

fn resolve(asked: Sampling, defaults: SamplingDefaults) -> Result<pb::Sampling, Error> {
    sampling(&Sampling { seed: Some(1), ..asked }, &defaults, 100)
}

#[test]
fn the_request_overrides_the_checkpoint_and_the_checkpoint_openai() {
    let checkpoint =
        SamplingDefaults { temperature: Some(0.6), top_p: Some(0.95), ..SamplingDefaults::default() };
    let asked = Sampling { temperature: Some(0.2), ..Sampling::default() };
    let got = resolve(asked, checkpoint).unwrap();
    assert_eq!((got.temperature, got.top_p, got.repetition_penalty), (0.2, 0.95, 1.0));
    assert_eq!(resolve(Sampling::default(), SamplingDefaults::default()).unwrap().temperature, 1.0);
}

#[test]
fn a_checkpoint_that_does_not_sample_is_greedy_unless_asked() {
    let greedy =
        SamplingDefaults { do_sample: Some(false), temperature: Some(0.6), ..SamplingDefaults::default() };
    assert_eq!(resolve(Sampling::default(), greedy.clone()).unwrap().temperature, 0.0);
    let asked = Sampling { temperature: Some(0.9), ..Sampling::default() };
    assert_eq!(resolve(asked, greedy).unwrap().temperature, 0.9);
}

#[test]
fn nan_is_in_no_range() {
    for asked in [
        Sampling { temperature: Some(f32::NAN), ..Sampling::default() },
        Sampling { top_p: Some(f32::NAN), ..Sampling::default() },
        Sampling { logit_bias: vec![(1, f32::NAN)], ..Sampling::default() },
    ] {
        assert!(resolve(asked, SamplingDefaults::default()).is_err());
    }
}

#[test]
fn biases_are_sorted_and_each_token_has_one() {
    let asked = Sampling { logit_bias: vec![(7, 1.0), (3, -1.0)], ..Sampling::default() };
    let got = resolve(asked, SamplingDefaults::default()).unwrap();
    assert_eq!(got.logit_bias.iter().map(|b| b.token_id).collect::<Vec<_>>(), [3, 7]);
    let asked = Sampling { logit_bias: vec![(7, 1.0), (7, -1.0)], ..Sampling::default() };
    let error = resolve(asked, SamplingDefaults::default()).unwrap_err();
    assert_eq!(error.field(), Some("logit_bias"));
}

#[test]
fn the_limit_is_exact_to_the_token() {
    let asked = |max_tokens| Stopping { max_tokens, ..Stopping::default() };
    let max_tokens = |stopping: &Stopping, prompt, limit| max_tokens(stopping, prompt, (limit, "a test"));
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
    assert_eq!(max_tokens(&stopping, 10, (16, "a test")), Ok(6));
    assert_eq!(max_tokens(&stopping, 10, (100, "a test")), Ok(16));
}

#[test]
fn every_choice_has_its_own_seed() {
    assert_eq!(choice_seed(42, 0), 42);
    let seeds: std::collections::HashSet<u64> = (0..128).map(|i| choice_seed(42, i)).collect();
    assert_eq!(seeds.len(), 128);
    assert_ne!(choice_seed(42, 1), choice_seed(43, 1));
}
