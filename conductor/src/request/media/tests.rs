use tutti_proto::declaration::{MediaForm, MediaInput, NodeId, Walk, WalkKind};

use super::*;

const HERE: u32 = 9;

fn model() -> ModelDeclaration {
    model_with(false, None)
}

fn model_with(encoded_together: bool, max_call_tokens: Option<u32>) -> ModelDeclaration {
    let walk = |kind| Walk { name: "w".into(), nodes: vec![NodeId(0)], kind };
    let walks = vec![walk(WalkKind::Atomic { batched_by: WalkId(1) }), walk(WalkKind::Mixed)];
    let input = MediaInput {
        kind: pb::MediaKind::Audio,
        walk: WalkId(0),
        placeholder: HERE,
        form: MediaForm::Bytes { per_token: 4 },
        width: 2,
        formats: vec!["wav".into()],
        encoded_together,
        max_call_tokens,
    };
    ModelDeclaration::new(vec!["audio_encoder".into()], walks, vec![])
        .unwrap()
        .with_media(vec![input])
        .unwrap()
}

fn item(first: u32, bytes: usize) -> pb::MediaItem {
    let (kind, format, data) = (pb::MediaKind::Audio.into(), "wav".into(), vec![7; bytes].into());
    let runs = vec![pb::MediaRun { first, tokens: bytes.div_ceil(4) as u32 }];
    pb::MediaItem { kind, format, data, runs, ..pb::MediaItem::default() }
}

fn good() -> RequestParts {
    let prompt = vec![1, HERE, HERE, 2, HERE];
    RequestParts { prompt, media: vec![item(1, 5), item(4, 1)], ..Default::default() }
}

#[track_caller]
fn refused(change: impl FnOnce(&mut RequestParts), field: &str, words: &str) {
    let mut spec = good();
    change(&mut spec);
    let error = check(&spec, &model()).unwrap_err();
    assert!(error.field() == Some(field) && error.message().contains(words), "{error:?}");
}

#[test]
fn what_stands_where_it_says_passes() {
    assert_eq!(check(&good(), &model()), Ok(vec![WalkId(0)]));
    let text = RequestParts { prompt: vec![1, 2], ..Default::default() };
    assert_eq!(check(&text, &model()), Ok(vec![]));
}

#[test]
fn what_does_not_is_refused_with_its_index() {
    refused(|spec| spec.media[1].kind = 0, "media[1].kind", "does not take");
    refused(|spec| spec.media[0].format = "mp3".into(), "media[0].format", "\"mp3\"");
    refused(|spec| spec.media[0].data.clear(), "media[0].data", "empty");
    refused(|spec| spec.media[0].runs[0].tokens = 3, "media[0].runs", "3 tokens, but the item has 2");
    refused(|spec| spec.media[1].runs[0].first = 3, "media[1].runs[0]", "begins at 3");
    refused(|spec| spec.media[1].runs[0].first = u32::MAX, "media[1].runs[0]", "begins at");
    refused(|spec| spec.media[1].runs[0].first = 2, "media[1].runs[0]", "of its own");
    refused(|spec| spec.prompt.push(HERE), "prompt", "4 placeholder tokens");
    refused(|spec| drop(spec.media.pop()), "prompt", "take 2");
    for (encoded_together, limit, field) in
        [(false, 2, None), (false, 1, Some("media[0]")), (true, 3, None), (true, 2, Some("media"))]
    {
        let checked = check(&good(), &model_with(encoded_together, Some(limit)));
        match field {
            None => assert_eq!(checked.unwrap(), [WalkId(0)]),
            Some(field) => {
                let error = checked.unwrap_err();
                let words = format!("takes at most {limit}");
                assert!(error.field() == Some(field) && error.message().contains(&words), "{error:?}");
            }
        }
    }
    let text_only = ModelDeclaration::new(vec![], vec![], vec![]).unwrap();
    assert!(check(&good(), &text_only).unwrap_err().message().contains("does not take"));
}

#[test]
fn equal_data_has_equal_digests_and_other_data_others() {
    let digests = Digest::default();
    let mut media = [item(0, 5), item(3, 5), item(0, 6), item(0, 5)];
    media[3].data = vec![8, 7, 7, 7, 7].into();
    digests.of(&mut media, &model());
    assert_eq!((media[0].digest.len(), &media[0].digest), (16, &media[1].digest));
    assert_ne!(media[0].digest, media[2].digest);
    assert_ne!(media[0].digest, media[3].digest);
}

#[test]
fn a_digest_covers_what_decides_embeddings_and_positions() {
    let digests = Digest::default();
    let digest_of = |change: fn(&mut pb::MediaItem)| {
        let mut media = [item(0, 5)];
        media[0].grid = Some(pb::MediaGrid { frames: 2, height: 2, width: 4 });
        media[0].seconds_per_grid = Some(1.0);
        change(&mut media[0]);
        digests.of(&mut media, &model());
        media[0].digest.clone()
    };
    let unchanged = digest_of(|_| ());
    assert_eq!(digest_of(|item| item.runs[0].first = 9), unchanged);
    assert_ne!(digest_of(|item| item.kind = pb::MediaKind::Video.into()), unchanged);
    assert_ne!(digest_of(|item| item.grid = None), unchanged);
    assert_ne!(
        digest_of(|item| item.grid = Some(pb::MediaGrid { frames: 2, height: 4, width: 2 })),
        unchanged
    );
    assert_ne!(digest_of(|item| item.seconds_per_grid = Some(2.0)), unchanged);
}

#[test]
fn the_digest_of_an_item_that_is_encoded_with_others_covers_them() {
    let digests = Digest::default();
    let first_of = |bytes: usize, encoded_together| {
        let mut media = [item(0, 5), item(3, bytes)];
        digests.of(&mut media, &model_with(encoded_together, None));
        media[0].digest.clone()
    };
    assert_eq!(first_of(5, true), first_of(5, true));
    assert_ne!(first_of(5, true), first_of(6, true));
    assert_eq!(first_of(5, false), first_of(6, false));
    let mut equal = [item(0, 5), item(3, 6)];
    digests.of(&mut equal, &model_with(true, None));
    assert_ne!(equal[0].digest, equal[1].digest);
}
