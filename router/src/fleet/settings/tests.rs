use super::*;

#[test]
fn the_defaults_are_valid_and_an_interval_of_zero_is_refused_by_name() {
    assert_eq!(FleetSettings::default().validate(), Ok(()));
    let error = FleetSettings { poll_ms: 0, ..FleetSettings::default() }.validate().unwrap_err();
    assert_eq!(error.field(), Some("fleet.poll_ms"));
}
