use super::*;

fn complete(asked: AskedSampling, checkpoint: AskedSampling) -> Result<SamplingParams, Refused> {
    let params = SamplingParams::complete(&asked, &checkpoint, || 1);
    params.check(100).map(|()| params)
}

#[test]
fn the_request_overrides_the_checkpoint_and_the_checkpoint_openai() {
    let checkpoint = AskedSampling { temperature: Some(0.6), top_p: Some(0.95), ..AskedSampling::default() };
    let asked = AskedSampling { temperature: Some(0.2), ..AskedSampling::default() };
    let got = complete(asked, checkpoint).unwrap();
    assert_eq!((got.temperature, got.top_p, got.repetition_penalty), (0.2, 0.95, 1.0));
    let alone = complete(AskedSampling::default(), AskedSampling::default()).unwrap();
    assert_eq!((alone.temperature, alone.seed), (1.0, 1));
}

#[test]
fn nan_is_in_no_range() {
    for asked in [
        AskedSampling { temperature: Some(f32::NAN), ..AskedSampling::default() },
        AskedSampling { top_p: Some(f32::NAN), ..AskedSampling::default() },
        AskedSampling { logit_bias: [(1, f32::NAN)].into(), ..AskedSampling::default() },
    ] {
        assert!(complete(asked, AskedSampling::default()).is_err());
    }
}

#[test]
fn biases_are_sorted_and_each_token_has_one() {
    let asked = AskedSampling { logit_bias: [(7, 1.0), (3, -1.0)].into(), ..AskedSampling::default() };
    let mut got = complete(asked, AskedSampling::default()).unwrap();
    assert_eq!(got.logit_bias.iter().map(|bias| bias.token_id).collect::<Vec<_>>(), [3, 7]);
    for biases in [vec![(7, 1.0).into(), (7, 1.0).into()], vec![(7, 1.0).into(), (3, 1.0).into()]] {
        got.logit_bias = biases;
        assert_eq!(got.check(100).unwrap_err().parameter, "logit_bias");
    }
}

#[test]
fn a_request_of_defaults_is_complete_and_its_values_are_in_their_ranges() {
    let params = complete(AskedSampling::default(), AskedSampling::default()).unwrap();
    for number in &NUMBERS {
        assert_eq!((number.of)(&params), number.default, "{}", number.bounds.name);
    }
    assert_eq!(SamplingParams::GREEDY.check(0), Ok(()));
}
