use super::*;

#[test]
fn a_choice_matches_its_texts_alone() {
    let texts: Vec<String> =
        ["a.b", "(x|y)", "a/b\\d", "[^]$*+?{}", "zwei\nZeilen", "日本", "-&~#"].map(String::from).into();
    let pattern = regex::Regex::new(&format!("^{}$", any_of(&texts))).unwrap();
    for text in &texts {
        assert!(pattern.is_match(text), "{text}");
    }
    for other in ["acb", "x", "a/b\\4", "日", ""] {
        assert!(!pattern.is_match(other), "{other}");
    }
}

#[test]
fn a_literal_keeps_quotes_and_line_breaks_inside() {
    assert_eq!(literal("a\"b\n"), r#""a\"b\n""#);
}
