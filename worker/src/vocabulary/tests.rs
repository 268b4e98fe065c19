use std::fs;

use serde_json::json;

use super::*;

fn limits(vocab_size: usize) -> Limits {
    Limits {
        vocab_size,
        max_context_tokens: 8,
        eos_token_ids: vec![1],
        max_step_tokens: 8,
        steps_in_flight: 1,
    }
}

fn error(read: &ReadVocabulary) -> String {
    read().expect_err("there is no vocabulary")
}

#[test]
fn the_vocabulary_is_that_of_the_tokenizer_padded_to_the_logits() {
    let dir = tempfile::tempdir().expect("a directory");
    fs::write(dir.path().join("config.json"), "{}").expect("it is writable");
    let read = reader(dir.path(), &limits(40));
    assert_eq!(error(&read), "needs a tokenizer, and the checkpoint has no tokenizer.json");
    let path = dir.path().join("tokenizer.json");
    fs::write(&path, "{").expect("it is writable");
    assert!(error(&read).starts_with("tokenizer.json is no JSON: "));
    let tokenizer = json!({"model": {"vocab": {"a": 0, "b": 1}}, "decoder": {"type": "ByteLevel"}});
    fs::write(&path, tokenizer.to_string()).expect("it is writable");
    let vocabulary = read().expect("it is there");
    assert_eq!((vocabulary.tokens().len(), vocabulary.ends()), (40, &[1][..]));
}
