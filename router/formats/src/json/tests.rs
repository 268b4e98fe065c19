use super::*;

fn extent(text: &str) -> Extent {
    JsonValue::default().feed(text)
}

#[test]
fn a_value_ends_behind_its_last_bracket_or_quote() {
    assert_eq!(extent("{\"a\": [1, {}]} rest"), Extent::Whole(14));
    assert_eq!(extent("\"a\\\"}\" rest"), Extent::Whole(6));
    assert_eq!(extent("{\"}]\""), Extent::Open);
    assert_eq!(extent(""), Extent::Open);
}

#[test]
fn a_scalar_ends_before_what_is_no_part_of_it() {
    assert_eq!(extent("-1.5e+3, 2"), Extent::Whole(7));
    assert_eq!(extent("null}"), Extent::Whole(4));
    assert_eq!(extent("12"), Extent::Open);
}

#[test]
fn a_byte_outside_json_breaks_a_value() {
    assert_eq!(extent("{\"a\": 1</tool_call>"), Extent::Broken(7));
    assert_eq!(extent("]"), Extent::Broken(0));
    assert_eq!(extent("{\"a</tool_call>\""), Extent::Open);
}

#[test]
fn brackets_are_counted_and_not_compared() {
    assert_eq!(extent("{\"a\": 1]"), Extent::Whole(8));
}

#[test]
fn escaped_text_is_the_inside_of_a_string() {
    assert_eq!(escape("a\"\\\n\u{1}é"), "a\\\"\\\\\\n\\u0001é");
}
