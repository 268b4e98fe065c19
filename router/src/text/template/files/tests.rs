use serde_json::json;

use super::*;
use crate::{
    test_support,
    text::tokenizer::{SpecialTokens, Tokenizer},
};

/// Id of the first token that the tokenizer of the tests lacks.
const NEW: u32 = 264;

fn read(config: Value, map: Option<Value>) -> TokenizerFiles {
    let map = map.map(|map| map.to_string());
    TokenizerFiles::read(Some(config.to_string().as_bytes()), map.as_ref().map(|map| map.as_bytes())).unwrap()
}

/// The declared tokens: `<` and `>` for white space that a token takes with it, `*` for one that is not special.
fn declared(config: Value, map: Option<Value>) -> String {
    let shown = |token: &AddedToken| {
        let marks = [(token.lstrip, "<"), (token.rstrip, ">"), (!token.special, "*")];
        marks.iter().filter(|(is, _)| *is).fold(token.content.clone(), |text, (_, mark)| text + mark)
    };
    read(config, map).declared.iter().map(shown).collect::<Vec<_>>().join(" ")
}

/// The expected values are those of transformers 5.23 for the same files.
#[test]
fn declared_tokens_are_those_of_transformers() {
    let typed = |text: &str| json!({ "__type": "AddedToken", "content": text, "lstrip": true });
    let of_config = [
        (json!({}), ""),
        (json!({ "additional_special_tokens": ["x", "y"] }), "x y"),
        (json!({ "additional_special_tokens": [typed("x"), "y"] }), "x<* y"),
        (json!({ "additional_special_tokens": ["x"], "extra_special_tokens": ["y"] }), "y"),
        (json!({ "additional_special_tokens": ["x"], "extra_special_tokens": [] }), "x"),
        (json!({ "additional_special_tokens": ["x"], "extra_special_tokens": null }), "x"),
        (
            json!({ "additional_special_tokens": ["x"], "extra_special_tokens": { "image_token": "y" } }),
            "y x",
        ),
        (json!({ "additional_special_tokens": ["x"], "extra_special_tokens": {} }), "x"),
        (
            json!({ "image_token": "y", "eos_token": typed("x"), "add_bos_token": true, "pad_token": null }),
            "x< y",
        ),
        (json!({ "eos_token": "x", "additional_special_tokens": ["x", "y", "y"] }), "x y"),
    ];
    for (config, expected) in of_config {
        assert_eq!(declared(config.clone(), None), expected, "{config}");
    }
    let of_both = [
        (
            json!({}),
            json!({ "eos_token": { "content": "x", "lstrip": true }, "additional_special_tokens": ["y"] }),
            "x< y",
        ),
        (
            json!({ "extra_special_tokens": ["z"] }),
            json!({ "extra_special_tokens": [{ "content": "y", "rstrip": true }, "z", "x"] }),
            "z y> x",
        ),
        (
            json!({ "extra_special_tokens": ["z"] }),
            json!({ "extra_special_tokens": { "image_token": "y" } }),
            "y",
        ),
        (json!({ "extra_special_tokens": ["z"] }), json!({ "additional_special_tokens": ["y"] }), "z"),
        (json!({}), json!({ "image_token": "y", "pad_token": "x" }), "x y"),
        (json!({ "eos_token": "x" }), json!({ "eos_token": "y" }), "y"),
        (json!({ "added_tokens_decoder": {}, "eos_token": "x" }), json!({ "pad_token": "z" }), "x"),
    ];
    for (config, map, expected) in of_both {
        assert_eq!(declared(config.clone(), Some(map.clone())), expected, "{config} {map}");
    }
}

#[test]
fn further_names_are_variables_of_templates_and_lists_are_not() {
    let named = |config| read(config, None).named.into_iter().collect::<Vec<_>>();
    let pair = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    let config = json!({ "eos_token": "x", "extra_special_tokens": { "image": "y" }, "audio_token": "z" });
    assert_eq!(named(config), [pair("audio_token", "z"), pair("eos_token", "x"), pair("image", "y")]);
    assert_eq!(named(json!({ "additional_special_tokens": ["x"] })), []);
}

#[test]
fn tokens_of_files_take_the_white_space_that_they_say() {
    let ids = |lstrip: bool, rstrip: bool| {
        let token = json!({ "content": "<x>", "lstrip": lstrip, "rstrip": rstrip });
        let files = read(json!({}), Some(json!({ "pad_token": token })));
        let tokenizer = Tokenizer::of(&test_support::tokenizer_json(), &files).unwrap();
        assert!(tokenizer.is_special(NEW));
        tokenizer.encode("a <x> b", SpecialTokens::Exclude).unwrap()
    };
    let [a, space, x, b] = [97, 32, NEW, 98];
    assert_eq!(ids(false, false), [a, space, x, space, b]);
    assert_eq!(ids(true, false), [a, x, space, b]);
    assert_eq!(ids(true, true), [a, x, b]);
}
