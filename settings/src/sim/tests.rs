use super::*;

#[test]
fn what_is_given_goes_over_the_profile() {
    let settings = SimSettings { fixed_us: Some(7), ..SimSettings::default() };
    assert_eq!(settings.costs(), SimCosts { fixed_us: 7, ..SimProfile::H200.costs() });
}

#[test]
fn settings_under_which_nothing_runs_are_refused_by_name() {
    let every = SimSettings { fail_every: Some(1), ..SimSettings::default() };
    assert_eq!(every.validate().unwrap_err().field, "sim.fail_every");
    let jitter = SimSettings { jitter_percent: 1001, ..SimSettings::default() };
    assert_eq!(jitter.validate().unwrap_err().field, "sim.jitter_percent");
    for (entry_tokens, state, refused) in
        [(1, false, false), (4, true, false), (3, true, true), (4, false, true)]
    {
        let settings = SimSettings { entry_tokens, state, ..SimSettings::default() };
        assert_eq!(
            settings.validate().err().map(|error| error.field),
            refused.then(|| "sim.entry_tokens".into())
        );
    }
}
