use super::*;
use crate::test_support;

fn files(tokenizer: &[u8]) -> TextFiles {
    TextFiles { tokenizer: Some(tokenizer.to_vec()), ..TextFiles::default() }
}

#[tokio::test]
async fn text_that_was_read_ahead_is_used_for_the_same_files_only() {
    let texts = Texts::new(TextSettings::default(), None);
    let first = files(&test_support::tokenizer_json());
    let other = TextFiles { generation_config: Some(b"{}".to_vec()), ..first.clone() };
    texts.keep_ahead(first.clone()).await;
    let is_read = |files: &TextFiles| matches!(texts.offer_of(files.clone()), Offer::Read(_));
    assert!(is_read(&first) && !is_read(&other));
    assert_eq!(texts.offer_of(first.clone()).digest(), first.digest());
    // Once an offer is read, the text that was parsed ahead is dropped.
    texts.read(texts.offer_of(other)).await.unwrap();
    assert!(!is_read(&first));
}

#[tokio::test]
async fn broken_files_are_reported_when_they_are_offered() {
    let texts = Texts::new(TextSettings::default(), None);
    texts.keep_ahead(files(b"{}")).await;
    let error = texts.read(texts.offer_of(files(b"{}"))).await.err().unwrap();
    assert_eq!(error.field(), Some("tokenizer"));
}
