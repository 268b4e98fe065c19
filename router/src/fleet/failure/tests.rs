use super::*;

#[test]
fn only_faults_count_against_a_conductor() {
    let verdict = |kind| Failure::from(Status::from(Error::new(kind, "no"))).verdict();
    for kind in [ErrorKind::Unavailable, ErrorKind::Internal] {
        assert_eq!(verdict(kind), Verdict::Fault);
    }
    for kind in [
        ErrorKind::InvalidArgument,
        ErrorKind::NotFound,
        ErrorKind::TooLarge,
        ErrorKind::Overloaded,
        ErrorKind::DeadlineExceeded,
        ErrorKind::Cancelled,
        ErrorKind::Unsupported,
    ] {
        assert_eq!(verdict(kind), Verdict::None);
    }
    let of_constraint = Error::internal("no").with_field("constraint");
    assert_eq!(Failure::from(Status::from(of_constraint)).verdict(), Verdict::None);
}

#[test]
fn an_error_of_the_conductor_is_distinguished_from_a_broken_connection() {
    let broken = Failure::from(Status::unknown("connection reset"));
    assert!(broken.may_go_elsewhere() && broken.verdict() == Verdict::Fault);
    assert_eq!(broken.error().kind(), ErrorKind::Unavailable);
    let said = Failure::from(Status::from(Error::internal("the device is lost")));
    assert!(!said.may_go_elsewhere() && said.verdict() == Verdict::Fault);
    let busy = Failure::from(Status::from(Error::overloaded("full", std::time::Duration::ZERO)));
    assert!(busy.may_go_elsewhere());
    // A message that is too large for gRPC is too large for every conductor.
    assert!(!Failure::from(Status::out_of_range("too large")).may_go_elsewhere());
}
