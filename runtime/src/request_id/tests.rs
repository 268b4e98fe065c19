use tutti_proto::{GraphId, GraphKey, Incarnation, RequestId};

use super::*;

#[test]
fn ids_are_taken_as_they_are_or_not_at_all() {
    let long = "x".repeat(MAX_BYTES);
    for id in ["a", "4bf92f35-77b3", "Root=1-67891233-abcdef;Self=1:2/3+4", &long] {
        assert_eq!(XRequestId::parse(id).as_ref().map(XRequestId::as_str), Some(id));
    }
    let too_long = "x".repeat(MAX_BYTES + 1);
    for id in ["", " ", "a b", "a\nb", "\"a\"", "a\\b", "é", "\u{7f}", &too_long] {
        assert_eq!(XRequestId::parse(id), None, "{id:?}");
    }
    let mut headers = HeaderMap::new();
    assert_eq!(XRequestId::of(&headers), None);
    headers.insert(XRequestId::HEADER, HeaderValue::from_static("one"));
    assert_eq!(XRequestId::of(&headers).unwrap().as_str(), "one");
    headers.insert(XRequestId::HEADER, HeaderValue::from_bytes(b"\xff").unwrap());
    assert_eq!(XRequestId::of(&headers), None);
    assert_eq!(XRequestId::random(7).as_str(), "00000000000000000000000000000007");
}

#[test]
fn graphs_have_the_id_of_their_request_until_the_last_has_ended() {
    let key = |request, graph| GraphKey {
        request: RequestId(request),
        incarnation: Incarnation(0),
        graph: GraphId(graph),
    };
    let id = |key| of_graph(key).map(|id| id.as_str().to_owned());
    // Numbers that no other test uses: the ids are the process's.
    let (one, other) = (u64::MAX, u64::MAX - 1);
    graph_launched(key(one, 0), "a");
    graph_launched(key(one, 1), "a");
    graph_launched(key(other, 0), "not valid");
    assert_eq!(
        (id(key(one, 0)), id(key(one, 7)), id(key(other, 0))),
        (Some("a".into()), Some("a".into()), None)
    );
    graph_ended(key(one, 0));
    assert_eq!(id(key(one, 0)).as_deref(), Some("a"), "another graph of the request runs");
    graph_ended(key(one, 1));
    assert_eq!(id(key(one, 1)), None);
}
