use opentelemetry_sdk::error::OTelSdkError;

use super::*;

#[test]
fn each_change_is_reported_once() {
    let failure = || Err(OTelSdkError::InternalFailure("refused".into()));
    let exporter = Reported::new((), "http://collector:4317".into());
    let outcomes = [Ok(()), failure(), failure(), Ok(()), Ok(()), failure()];
    let changes: Vec<_> = outcomes.iter().map(|outcome| exporter.change(outcome)).collect();
    assert_eq!(changes, [None, Some(Change::Lost), None, Some(Change::Back), None, Some(Change::Lost)]);
    assert_eq!(
        Reported::new((), String::new()).change(&failure()),
        Some(Change::Lost),
        "the first export may fail"
    );
}
