use super::*;

#[test]
fn an_answer_of_something_else_says_what_the_address_is_not() {
    let said = |status: Status| unanswered(status, "http://here:1").to_string();
    let http = said(Status::unimplemented("grpc-status header missing, mapped from HTTP status code 404"));
    assert_eq!(
        http,
        "http://here:1 is not a conductor's --cluster-grpc: it serves HTTP, as a port of --http or --operations"
    );
    let with_body = "protocol error: received message with invalid compression flag: 123 (valid flags are 0 and 1) while \
                     receiving response with status: 404 Not Found";
    assert_eq!(said(Status::internal(with_body)), http);
    assert!(said(Status::unimplemented("")).contains("as a port of --grpc or --worker-listen"));
    let broken = said(Status::unknown("transport error"));
    assert!(broken.contains("does not answer as a conductor's --cluster-grpc: transport error"), "{broken}");
    // The errors of a conductor are its own.
    let own = Error::invalid("worker", "there is no worker 7");
    assert_eq!(unanswered(own.clone().into(), "http://here:1"), own);
}
