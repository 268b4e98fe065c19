use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// A tokenizer with merges across every place at which a cut would be wrong.
fn tokenizer(pre_tokenizer: &Value) -> Tokenizer {
    let mut json: Value = serde_json::from_slice(&crate::test_support::tokenizer_json()).unwrap();
    let merges =
        ["a Ġ", "b Ċ", "Ċ a", "Ġ a", "Ġ Ġ", "ĠĠ a", "Ċ Ċ", ". Ċ", "a b", "ab ab", "Ġ Ċ", "' s", "Ċ Ġ", "1 Ġ"];
    let vocab = json["model"]["vocab"].as_object_mut().unwrap();
    for merge in merges {
        let id = 300 + vocab.len();
        vocab.insert(merge.replace(' ', ""), json!(id));
    }
    json["model"]["merges"] = json!(merges);
    json["pre_tokenizer"] = pre_tokenizer.clone();
    json["normalizer"] = json!({ "type": "NFC" });
    Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
}

fn split(regex: &str) -> Value {
    json!({ "type": "Sequence", "pretokenizers": [
        { "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false },
        { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
    ] })
}

/// Every kind of tokenizer whose texts are cut.
static KINDS: LazyLock<Vec<(Value, Tokenizer)>> = LazyLock::new(|| {
    let kinds = KNOWN.iter().map(|regex| split(regex)).chain([byte_level(false)]);
    let kinds: Vec<_> = kinds.map(|kind| (kind.clone(), tokenizer(&kind))).collect();
    assert!(kinds.iter().all(|(_, tokenizer)| allowed(tokenizer)));
    kinds
});

fn byte_level(add_prefix_space: bool) -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": true })
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec()
}

#[test]
fn unknown_kinds_are_not_cut() {
    assert!(allowed(&tokenizer(&byte_level(false))));
    assert!(!allowed(&tokenizer(&byte_level(true))));
    assert!(!allowed(&tokenizer(&split(r"\s+"))));
    assert!(!allowed(&tokenizer(&json!({ "type": "Whitespace" }))));
    assert!(!allowed(&tokenizer(&Value::Null)));
    let mut spaced = tokenizer(&byte_level(false));
    spaced.add_tokens([tokenizers::AddedToken::from("a b", false)]).unwrap();
    assert!(!allowed(&spaced));
    let mut stripping = tokenizer(&byte_level(false));
    stripping.add_tokens([tokenizers::AddedToken::from("<x>", false).lstrip(true)]).unwrap();
    assert!(!allowed(&stripping));
}

#[test]
fn words_and_lines_are_cut_and_white_space_is_not() {
    assert_eq!(cut("aa bb cc", 3), ["aa bb", " cc"]);
    assert_eq!(cut("aa;\nbb", 3), ["aa;\n", "bb"]);
    for whole in ["aa  bb", "aa \nbb", "aa\n\nbb", "aa\r\nbb", "aa\n bb", "aa 1bb", "1 a", "éé éé"] {
        assert_eq!(cut(whole, 1), [whole]);
    }
}

#[test]
fn the_longest_run_is_in_bytes_and_of_one_class() {
    assert_eq!(longest_run("ab  \t\ncd12"), 4);
    assert_eq!(longest_run("日本語 a"), 9);
    assert_eq!(longest_run(""), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn segments_have_the_token_ids_of_the_whole_text(
        words in prop::collection::vec(
            prop::sample::select(vec![
                "a", "b", "ab", "abab", " ", "  ", "\n", "\n\n", "\r\n", "\t", ".", ";", "'s", "'S", "'", "1", "12", "1234",
                "é", "e\u{301}", "\u{301}", "日本", "<|end|>", "<think>", "hello", " a", "a\nb", "a b", "\u{a0}", "\u{2028}", "🎻",
            ]),
            0..60,
        ),
        target in 1usize..24,
    ) {
        let text = words.concat();
        for (kind, tokenizer) in &*KINDS {
            let segments = cut(&text, target);
            prop_assert_eq!(segments.concat(), text.clone());
            let joined: Vec<u32> = segments.iter().flat_map(|segment| ids(tokenizer, segment)).collect();
            prop_assert_eq!(joined, ids(tokenizer, &text), "{:?} {:?}", segments, kind);
        }
    }
}
