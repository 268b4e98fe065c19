use super::*;

#[test]
fn a_key_is_read_as_it_is_displayed_and_other_text_is_none() {
    let key = GraphKey { request: RequestId(u64::MAX), incarnation: Incarnation(2), graph: GraphId(1) };
    assert_eq!(GraphKey::parse(&key.to_string()), Some(key));
    for text in ["", "1", "1.2", "1.2.3.4", "1.2.x", "1.-2.3", "1.2.4294967296"] {
        assert_eq!(GraphKey::parse(text), None, "{text}");
    }
}
