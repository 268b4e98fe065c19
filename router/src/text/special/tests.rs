use super::*;

fn found(text: &str, parts: Fragments) -> Vec<&str> {
    let texts = ["<|im_start|>", "<|user|>", "</s>", "<s>", ""].map(str::to_owned);
    let special = SpecialTexts::new(texts.to_vec()).unwrap();
    let mut found: Vec<&str> = special.find(text, parts).into_iter().map(|range| &text[range]).collect();
    found.sort_unstable();
    found.dedup();
    found
}

#[test]
fn whole_tokens_are_found_anywhere() {
    assert_eq!(found("a <s>b</s> c", Fragments::All), ["</s>", "<s>"]);
    assert_eq!(found("a < s > | user b", Fragments::All), [""; 0]);
    assert_eq!(found("", Fragments::All), [""; 0]);
}

#[test]
fn parts_that_the_text_around_could_complete_are_found() {
    assert_eq!(found("so <|im_", Fragments::All), ["<|im_"]);
    assert_eq!(found("start|> so", Fragments::All), ["start|>"]);
    assert_eq!(found("é <", Fragments::All), ["<"]);
    assert_eq!(found("> é", Fragments::All), [">"]);
    assert_eq!(found("user", Fragments::All), ["user"]);
    assert_eq!(found("im_start", Fragments::All), ["im_start"]);
    assert_eq!(found("users", Fragments::All), [""; 0]);
}

#[test]
fn words_are_no_parts_if_they_are_left_out() {
    assert_eq!(found("user", Fragments::WithoutWords), [""; 0]);
    assert_eq!(found("im_start", Fragments::WithoutWords), ["im_start"]);
    assert_eq!(found("user|>", Fragments::WithoutWords), ["user|>"]);
    assert_eq!(found("<s>", Fragments::WithoutWords), ["<s>"]);
}

#[test]
fn without_special_tokens_nothing_is_found() {
    let special = SpecialTexts::new(vec![]).unwrap();
    assert!(special.find("<s> user <", Fragments::All).is_empty());
}
