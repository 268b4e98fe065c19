use super::*;

fn found(text: &str, parts: Parts) -> Vec<&str> {
    let texts = ["<|im_start|>", "<|user|>", "</s>", "<s>", ""].map(str::to_owned);
    let special = SpecialTexts::new(texts.to_vec()).unwrap();
    let mut found: Vec<&str> = special.find(text, parts).into_iter().map(|range| &text[range]).collect();
    found.sort_unstable();
    found.dedup();
    found
}

#[test]
fn whole_tokens_are_found_anywhere() {
    assert_eq!(found("a <s>b</s> c", Parts::All), ["</s>", "<s>"]);
    assert_eq!(found("a < s > | user b", Parts::All), [""; 0]);
    assert_eq!(found("", Parts::All), [""; 0]);
}

#[test]
fn parts_that_the_text_around_could_complete_are_found() {
    assert_eq!(found("so <|im_", Parts::All), ["<|im_"]);
    assert_eq!(found("start|> so", Parts::All), ["start|>"]);
    assert_eq!(found("é <", Parts::All), ["<"]);
    assert_eq!(found("> é", Parts::All), [">"]);
    assert_eq!(found("user", Parts::All), ["user"]);
    assert_eq!(found("im_start", Parts::All), ["im_start"]);
    assert_eq!(found("users", Parts::All), [""; 0]);
}

#[test]
fn words_are_no_parts_if_they_are_left_out() {
    assert_eq!(found("user", Parts::WithoutWords), [""; 0]);
    assert_eq!(found("im_start", Parts::WithoutWords), ["im_start"]);
    assert_eq!(found("user|>", Parts::WithoutWords), ["user|>"]);
    assert_eq!(found("<s>", Parts::WithoutWords), ["<s>"]);
}

#[test]
fn without_special_tokens_nothing_is_found() {
    let special = SpecialTexts::new(vec![]).unwrap();
    assert!(special.find("<s> user <", Parts::All).is_empty());
}
