use super::*;

#[test]
fn the_defaults_are_valid_and_zero_is_refused_by_name() {
    assert_eq!(RouterSettings::default().validate(), Ok(()));
    let error = RouterSettings { tokenizer_threads: 0, ..RouterSettings::default() }.validate().unwrap_err();
    assert_eq!(error.field, "tokenizer_threads");
}

#[test]
fn the_defaults_are_valid_and_a_pace_of_zero_is_refused_by_name() {
    assert_eq!(FleetSettings::default().validate(), Ok(()));
    let error = FleetSettings { poll_ms: 0, ..FleetSettings::default() }.validate().unwrap_err();
    assert_eq!(error.field, "fleet.poll_ms");
}
