use super::*;

fn run(first: u32, logprobs: &[f32]) -> Run {
    let tokens = logprobs.iter().map(|&logprob| TokenLogprob { logprob, rank: 1, top: vec![] }).collect();
    Run { first, tokens }
}

#[test]
fn runs_join_and_repeats_are_skipped() {
    let mut all = PromptLogprobs::new(4);
    all.add(run(1, &[-1.0, -2.0])).unwrap();
    all.add(run(1, &[-1.0, -2.0, -3.0])).unwrap();
    all.add(run(4, &[-4.0])).unwrap();
    let got: Vec<f32> = all.complete().unwrap().iter().map(|t| t.logprob).collect();
    assert_eq!(got, [-1.0, -2.0, -3.0, -4.0]);
}

#[test]
fn a_gap_is_an_error() {
    let mut all = PromptLogprobs::new(4);
    assert!(all.add(run(2, &[-1.0])).is_err());
    assert!(PromptLogprobs::new(1).complete().is_err());
}
