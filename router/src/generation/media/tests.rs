use std::sync::Arc;

use super::*;
use crate::served::ServedText;

const HERE: u32 = 9;

fn model(takes_audio: bool) -> ServedModel {
    let input = pb::MediaInput {
        kind: pb::MediaKind::Audio.into(),
        walk: 0,
        placeholder_token_id: HERE,
        form: Some(pb::media_input::Form::BytesPerToken(4)),
        width: 2,
        formats: vec!["wav".into()],
        encoded_together: false,
        max_call_tokens: None,
    };
    let declaration =
        pb::ModelDeclaration { media: if takes_audio { vec![input] } else { vec![] }, ..Default::default() };
    let text = ServedText {
        tokenizer: None,
        template: None,
        defaults: Default::default(),
        dialect: Default::default(),
    };
    let description = pb::ModelDescription {
        max_context_tokens: 16,
        max_request_tokens: 16,
        declaration: Some(declaration),
        ..Default::default()
    };
    ServedModel { description, text: Arc::new(text) }
}

fn audio(bytes: usize) -> Media {
    let path = "media[0]".into();
    Media { path, kind: pb::MediaKind::Audio, format: "wav".into(), data: vec![1; bytes] }
}

#[test]
fn each_item_gets_the_placeholders_that_its_bytes_need() {
    let (ids, items) = expand(vec![1, HERE, 2, HERE], vec![audio(9), audio(4)], &model(true)).unwrap();
    assert_eq!(ids, [1, HERE, HERE, HERE, 2, HERE]);
    let positions: Vec<_> = items
        .iter()
        .map(|item| (item.runs[0].first, item.runs[0].tokens, item.data.len()))
        .collect();
    assert_eq!(positions, [(1, 3, 9), (5, 1, 4)]);
    assert_eq!(expand(vec![1, HERE], vec![], &model(false)).unwrap(), (vec![1, HERE], vec![]));
}

#[test]
fn media_without_a_matching_placeholder_is_refused() {
    let refused = |ids: &[u32], media: Vec<Media>, takes_audio, field: &str, words: &str| {
        let error = expand(ids.to_vec(), media, &model(takes_audio)).unwrap_err();
        assert!(error.field() == Some(field) && error.message().contains(words), "{error:?}");
    };
    refused(&[1, HERE], vec![], true, "prompt", "has 1 placeholders");
    refused(&[1], vec![audio(4)], true, "prompt", "has 0 placeholders");
    refused(&[HERE], vec![audio(4)], false, "media[0]", "does not take");
    refused(&[HERE], vec![Media { format: "mp3".into(), ..audio(4) }], true, "media[0].format", "one of wav");
    refused(&[HERE], vec![audio(0)], true, "media[0].data", "empty");
    refused(&[HERE], vec![audio(68)], true, "prompt", "17 tokens");
}
