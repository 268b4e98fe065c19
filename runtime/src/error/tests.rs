use super::*;

#[test]
fn every_kind_has_its_own_row() {
    for (index, row) in ErrorKind::TABLE.iter().enumerate() {
        assert_eq!(row.0 as usize, index);
        assert_eq!(ErrorKind::from_wire(row.4), row.0);
        // `RateLimited` and `TooSlow` share their gRPC codes with other kinds, which a code alone stands for.
        let of_code = match row.0 {
            ErrorKind::RateLimited => ErrorKind::Overloaded,
            ErrorKind::TooSlow => ErrorKind::DeadlineExceeded,
            kind => kind,
        };
        assert_eq!(ErrorKind::from_grpc(row.1), of_code);
        assert_eq!(Error::from(Status::from(Error::new(row.0, "no"))).kind(), row.0);
    }
}

#[test]
fn a_value_of_any_length_leaves_a_short_error() {
    let value = "é".repeat(16 << 20);
    let error = Error::invalid(value.clone(), format!("is {value:?}, the limit is 7"));
    assert!(error.message().len() <= MAX_MESSAGE_BYTES && error.message().ends_with("the limit is 7"));
    assert!(error.message().starts_with("is \"éé") && error.message().contains("é … é"));
    assert!(error.field().is_some_and(|field| field.len() <= MAX_FIELD_BYTES && field.starts_with('é')));
    let short = "x".repeat(MAX_MESSAGE_BYTES);
    assert_eq!(Error::internal(short.clone()).message(), short);
}

#[test]
fn an_error_survives_a_grpc_status() {
    let sent = Error::overloaded("512 requests are in flight, the limit is 512", Duration::from_secs(3))
        .with_field("n");
    assert_eq!(Error::from(Status::from(sent.clone())), sent);
}

#[test]
fn a_foreign_status_is_classified_by_its_code() {
    let status = Status::unavailable("connection refused");
    assert!(!Error::is_carried_by(&status) && Error::is_carried_by(&Error::unavailable("draining").into()));
    let error = Error::from(status);
    assert_eq!((error.kind(), error.field()), (ErrorKind::Unavailable, None));
}

#[test]
fn a_fault_keeps_kind_and_field() {
    let sent = Error::invalid("prompt", "is empty");
    assert_eq!(Error::from(pb::Fault::from(sent.clone())), sent);
}
