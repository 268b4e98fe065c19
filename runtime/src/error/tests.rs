use super::*;

#[test]
fn every_kind_has_its_own_row() {
    for (index, row) in ErrorKind::TABLE.iter().enumerate() {
        assert_eq!(row.0 as usize, index);
        assert_eq!(ErrorKind::from_wire(row.4), row.0);
        assert_eq!(ErrorKind::from_grpc(row.1), row.0);
    }
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
