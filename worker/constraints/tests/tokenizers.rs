//! Masks for the tokenizers of many families, as files that others wrote.
//!
//! `REFERENCE_TEXTS` is their folder; without it, the test skips itself and says so.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::{collections::HashMap, env, fs, path::Path};

use serde_json::{Value, json};
use support::{End, Tested, is_set, judge, of_schema, walk};
use tutti_constraints::{BaseMatchers, Declared, Token, Vocabulary};

/// Logits behind the last token, as checkpoints pad their matrices.
const PADDING: usize = 70;

#[test]
fn masks_hold_for_the_tokenizers_of_all_families() {
    let Some(root) = env::var_os("REFERENCE_TEXTS") else {
        eprintln!("skipped: REFERENCE_TEXTS is not set (tests/run sets it)");
        return;
    };
    let mut read = 0;
    for folder in fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()) {
        let Ok(file) = fs::read(folder.join("tokenizer.json")) else { continue };
        let json: Value = serde_json::from_slice(&file).unwrap();
        let name = folder.file_name().unwrap().to_string_lossy();
        if json["model"]["type"] == "WordPiece" {
            let declared = Declared { logits: 1000, ends: &[0], markers: &[] };
            let error = Vocabulary::from_tokenizer_json(&json, &declared).unwrap_err();
            assert_eq!(error.to_string(), "tokenizer.json: has a decoder whose tokens have no known bytes");
            continue;
        }
        let tested = Tested::new(vocabulary(&folder, &json));
        bytes_are_those_of_the_library(&name, &json, &tested.vocabulary);
        documents_are_valid(&name, &tested);
        read += 1;
    }
    assert!(read > 0, "no tokenizer.json below REFERENCE_TEXTS");
}

/// The tokens of a file, with the end token that its checkpoint declares.
fn vocabulary(folder: &Path, json: &Value) -> Vocabulary {
    let config: Value =
        serde_json::from_slice(&fs::read(folder.join("tokenizer_config.json")).unwrap()).unwrap();
    let added = json["added_tokens"].as_array().unwrap();
    let end = config["eos_token"].as_str().or_else(|| config["eos_token"]["content"].as_str());
    let end = added.iter().find(|added| added["content"].as_str() == end || added["content"] == "</s>");
    let end = end.unwrap()["id"].as_u64().unwrap() as u32;
    let ids =
        json["model"]["vocab"].as_object().unwrap().values().chain(added.iter().map(|added| &added["id"]));
    let logits = ids.map(|id| id.as_u64().unwrap()).max().unwrap() as usize + 1 + PADDING;
    Vocabulary::from_tokenizer_json(json, &Declared { logits, ends: &[end], markers: &[] }).unwrap()
}

/// The library reads the files of most families, too, though not the end tokens and the markers.
fn bytes_are_those_of_the_library(name: &str, json: &Value, vocabulary: &Vocabulary) {
    let theirs = llguidance::token_bytes_from_tokenizer_json(json).unwrap();
    let mut compared = 0;
    for (id, (token, bytes)) in vocabulary.tokens().iter().zip(&theirs).enumerate() {
        match token {
            Token::Text(text) => {
                assert_eq!(text, bytes, "token {id} of {name}");
                compared += 1;
            }
            Token::Special(text) => assert!(bytes.ends_with(text.as_bytes()), "token {id} of {name}"),
            Token::Unused => assert!(bytes.is_empty() || *bytes == [0xff], "token {id} of {name}"),
        }
    }
    assert!(compared >= 255 && vocabulary.tokens().len() == theirs.len() + PADDING, "{name}");
}

fn documents_are_valid(name: &str, tested: &Tested) {
    let schema = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 30},
            "degrees": {"type": "number", "minimum": -90, "maximum": 60},
            "when": {"type": "string", "format": "date"},
            "tags": {"type": "array", "items": {"enum": ["mild", "日", "\n"]}, "maxItems": 3},
        },
        "required": ["city", "degrees", "when", "tags"],
        "additionalProperties": false,
    });
    let constraint = of_schema(schema.clone());
    assert_eq!(tested.check(&constraint), Ok(()), "{name}");
    let text =
        "{\"city\": \"Zürich 🙂\", \"degrees\": -3.5,\n \"when\": \"2026-11-26\", \"tags\":[\"日\",\"\\n\"]}";
    assert!(tested.admits(&constraint, text), "{name}");
    assert!(!tested.admits(&constraint, &text.replace("-3.5", "-93.5")), "{name}");
    let mut cache = BaseMatchers::new(usize::MAX);
    let mut random = fastrand::Rng::with_seed(5);
    let mut ended = 0;
    for _ in 0..4 {
        let mut masks: HashMap<usize, Vec<u32>> = HashMap::new();
        let mut each = |_: &mut _, tokens: &[u32], words: &[u32]| {
            assert_eq!(words.len(), tested.vocabulary.tokens().len().div_ceil(32));
            for (token, id) in tested.vocabulary.tokens().iter().zip(0..) {
                assert!(matches!(token, Token::Text(_)) || !is_set(words, id), "token {id} of {name}");
            }
            masks.insert(tokens.len(), words.to_vec());
        };
        let mut matcher = cache.matcher(&tested.environment, &constraint).unwrap();
        let (tokens, end) = walk(tested, &mut matcher, &mut random, 300, &mut each);
        let middle = tokens.len() / 2;
        let (mut replayed, _) = cache.replayed(&tested.environment, &constraint, &tokens[..middle]).unwrap();
        let mut words = vec![0; replayed.mask_words()];
        replayed.mask(&mut words).unwrap();
        assert_eq!(words, masks[&middle], "{name}");
        if end == End::Ended {
            ended += 1;
            let text = tested.text(&tokens);
            let document = serde_json::from_str(&text).unwrap();
            assert!(judge::is_valid(&schema, &schema, &document), "{name}: {text}");
        }
    }
    assert!(ended > 0, "{name}: no walk ended");
}
