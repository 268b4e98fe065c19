use super::*;

fn facts(status: Option<Status>, is_whole: bool, outcome: Option<&'static str>) -> Facts {
    let generation = outcome.map(|outcome| GenerationEnd {
        outcome,
        error: None,
        first_token: None,
        usage: Usage::default(),
    });
    Facts { status, answer: Some(AnswerEnd { bytes: 1, is_whole }), generation, ..Facts::default() }
}

#[test]
fn the_outcome_tells_a_failure_a_refusal_and_a_client_that_left_from_success() {
    let http = |status| Some(Status::Http(status));
    for (facts, expected) in [
        (facts(http(200), true, Some("finished")), "finished"),
        (facts(http(200), true, None), "finished"),
        // A stream fails after its status was sent.
        (facts(http(200), true, Some("failed")), "failed"),
        (facts(http(200), false, Some("cancelled")), "cancelled"),
        // The generation finished, and then the client left without the answer.
        (facts(http(200), false, Some("finished")), "cancelled"),
        (facts(None, false, None), "cancelled"),
        (facts(http(401), true, None), "refused"),
        (facts(http(500), true, None), "failed"),
        (facts(http(429), true, Some("refused")), "refused"),
        // A fault before the generation was accepted.
        (facts(http(500), true, Some("refused")), "failed"),
        // An operator has cancelled it before its answer.
        (facts(http(499), true, Some("cancelled")), "cancelled"),
        (facts(Some(Status::Grpc(tonic::Code::Cancelled)), true, Some("cancelled")), "cancelled"),
        // A revoked key.
        (facts(http(401), true, Some("cancelled")), "refused"),
        (facts(Some(Status::Grpc(tonic::Code::NotFound)), true, None), "refused"),
        (facts(Some(Status::Grpc(tonic::Code::Ok)), true, Some("finished")), "finished"),
    ] {
        let (_, is_success, outcome) = facts.outcome(Status::Http(CLIENT_LEFT));
        assert_eq!((outcome, is_success), (expected, expected == "finished"));
    }
    assert_eq!(
        facts(None, false, None).outcome(Status::Grpc(tonic::Code::Cancelled)).0,
        Status::Grpc(tonic::Code::Cancelled)
    );
}
