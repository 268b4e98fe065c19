use super::*;

#[test]
fn messages_of_the_library_are_one_short_line_in_lower_case() {
    assert_eq!(shorten("Unknown thing\n<state>\nTokens: secret\n</state>"), "unknown thing");
    assert_eq!(shorten("\n\n"), "not accepted");
    assert_eq!(shorten("panic: index out of bounds\n<backtrace>"), "cannot be compiled");
    assert_eq!(shorten("NoExtensionBias\n<non-verbose/>"), "no token can follow");
    let long = shorten(&"ä".repeat(500));
    assert!(long.len() <= MAX_MESSAGE + '…'.len_utf8() && long.ends_with('…'));
}

#[test]
fn the_position_stands_before_the_message() {
    assert_eq!(
        ConstraintError::at("schema.not", "cannot be enforced").to_string(),
        "schema.not: cannot be enforced"
    );
    assert_eq!(ConstraintError::at("", "cannot be enforced").to_string(), "cannot be enforced");
}
