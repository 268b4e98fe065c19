use super::*;

#[test]
fn values_are_counted_and_text_is_not() {
    for (json, values) in [
        ("1", 1),
        ("\"a, [b] {c} \\\" , \\\\\"", 1),
        ("[1, 2]", 3),
        ("{\"a\": [1, {\"b\": \"x,y\"}], \"c\": null}", 6),
        ("[[],[]]", 5),
    ] {
        assert_eq!(count(json), values, "{json}");
    }
}

#[test]
fn the_sum_of_all_pieces_has_a_limit() {
    let mut count = ValueCount::up_to(5);
    count.add("a", "[1, 2]").unwrap();
    count.add("b", "[1]").unwrap();
    assert_eq!(count.add("c", "1").unwrap_err().field(), Some("c"));
}
