use super::{
    adjusted_tokens, candidates, gathered, logit_row, nominated_rows, nominated_tokens, peaks, scored_token,
};
use crate::{DeviceError, Nomination, SampleRow, SamplingParams};

#[track_caller]
fn refused(checked: Result<(), DeviceError>, words: &str) {
    match checked {
        Err(DeviceError::Misuse(why)) => assert_eq!(why, words),
        other => panic!("{other:?}, wanted the refusal: {words}"),
    }
}

#[test]
fn what_is_refused_is_named_with_its_limit() {
    candidates(2).unwrap();
    refused(candidates(0), "candidates of 0 numbers");
    refused(candidates(3), "candidates of 3 numbers");
    peaks([4, 2], 4).unwrap();
    refused(peaks([3, 2], 4), "peaks of 3 rows and 2 numbers for 4 rows");
    refused(peaks([4, 1], 4), "peaks of 4 rows and 1 numbers for 4 rows");
    gathered([4, 2], &[0, 3]).unwrap();
    refused(gathered([4, 2], &[0, 4]), "candidates of 2 numbers in 4 rows for [0, 4]");
    refused(gathered([4, 3], &[]), "candidates of 3 numbers in 4 rows for []");
    logit_row(3, 4).unwrap();
    refused(logit_row(4, 4), "row 4 of 4 rows of logits");
    scored_token(6, 7).unwrap();
    refused(scored_token(7, 7), "token 7 of 7 logits");
}

#[test]
fn nominations_ascend_and_have_room() {
    let of = |count| Nomination { count, temperature: 0.0, adjustments: None };
    let (few, many, too_many) = (of(2), of(256), of(257));
    nominated_rows(&[(0, &few), (2, &few)], 3).unwrap();
    refused(
        nominated_rows(&[(2, &few), (0, &few)], 3),
        "nominations for rows [2, 0] of 3, which must ascend",
    );
    refused(nominated_rows(&[(3, &few)], 3), "nominations for rows [3] of 3, which must ascend");
    nominated_tokens(&[(0, &few)], 1000, 4).unwrap();
    nominated_tokens(&[(0, &many)], 1000, 512).unwrap();
    // A shard of two tokens nominates at most two.
    nominated_tokens(&[(0, &too_many)], 2, 4).unwrap();
    refused(nominated_tokens(&[(0, &few)], 1000, 3), "2 nominated tokens in rows of 3 numbers");
    refused(nominated_tokens(&[(0, &few)], 1000, 2), "2 nominated tokens in rows of 2 numbers");
    refused(nominated_tokens(&[(0, &too_many)], 1000, 1024), "257 nominated tokens in rows of 1024 numbers");
}

#[test]
fn tokens_of_a_row_that_is_adjusted_are_those_of_the_vocabulary() {
    let plain = SamplingParams::GREEDY;
    let penalised = SamplingParams { presence_penalty: 1.0, ..plain.clone() };
    let biased = SamplingParams { logit_bias: vec![(5, 1.0).into()], ..plain.clone() };
    let row = |params, prompt, forbidden| SampleRow {
        params,
        prompt,
        output: &[],
        forbidden,
        allowed: None,
        position: 0,
        logprobs: None,
    };
    // The prompt of a row without adjustments is not checked, because nothing reads it.
    adjusted_tokens(&row(&plain, &[9], &[]), 5).unwrap();
    adjusted_tokens(&row(&penalised, &[4], &[4]), 5).unwrap();
    for (params, prompt, forbidden) in
        [(&penalised, &[5][..], &[][..]), (&plain, &[], &[5]), (&biased, &[], &[])]
    {
        refused(adjusted_tokens(&row(params, prompt, forbidden), 5), "token 5 of a vocabulary of 5");
    }
}
