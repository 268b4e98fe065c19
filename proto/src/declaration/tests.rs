use super::*;

fn paged(name: &str, page_tokens: u32, ratio: u32, bytes_per_entry: u64) -> Plane {
    Plane {
        name: name.into(),
        kind: PlaneKind::Paged { page_tokens, ratio, bytes_per_entry, element_type: pb::ElementType::Bf16 },
    }
}

fn slot(name: &str, bytes: u64) -> Plane {
    Plane { name: name.into(), kind: PlaneKind::Slot { bytes } }
}

fn with_planes(planes: Vec<Plane>) -> Result<ModelDeclaration, DeclarationError> {
    ModelDeclaration::new(vec![], vec![], planes)
}

fn thinker() -> ModelDeclaration {
    let batched_by = WalkId(2);
    let walk = |name: &str, kind| Walk { name: name.into(), nodes: vec![NodeId(0)], kind };
    ModelDeclaration::new(
        vec!["thinker".into()],
        vec![
            walk("prefill_text", WalkKind::Chunkable { batched_by }),
            walk("thinker_decode", WalkKind::Decode { batched_by }),
            walk("thinker_step", WalkKind::Mixed),
        ],
        vec![paged("kv", 16, 1, 512)],
    )
    .unwrap()
}

fn audio(walk: u32) -> MediaInput {
    let (kind, walk, formats) = (pb::MediaKind::Audio, WalkId(walk), vec!["wav".into()]);
    let (encoded_together, max_call_tokens) = (false, None);
    let (placeholder, form, width) = (7, MediaForm::Bytes { per_token: 64 }, 8);
    MediaInput { kind, walk, placeholder, form, width, formats, encoded_together, max_call_tokens }
}

fn omni() -> ModelDeclaration {
    let mut walks = thinker().walks;
    let kind = WalkKind::Atomic { batched_by: WalkId(2) };
    walks.push(Walk { name: "prefill_audio".into(), nodes: vec![NodeId(1)], kind });
    ModelDeclaration::new(vec!["thinker".into(), "audio_encoder".into()], walks, vec![]).unwrap()
}

#[test]
fn a_declaration_survives_the_wire() {
    let planes = vec![slot("state", 96), paged("kv", 128, 1, 8), paged("compressed", 128, 4, 6)];
    let joint = MediaInput { encoded_together: true, max_call_tokens: Some(9), ..audio(3) };
    let media = |input| omni().with_media(vec![input]).unwrap();
    for sent in [thinker(), media(audio(3)), media(joint), with_planes(planes).unwrap()] {
        assert_eq!(ModelDeclaration::try_from(pb::ModelDeclaration::from(&sent)), Ok(sent));
    }
}

#[test]
fn media_have_an_atomic_walk_and_are_declared_once() {
    let problem = |media: Vec<MediaInput>| omni().with_media(media).unwrap_err().to_string();
    assert!(problem(vec![audio(0)]).contains("not atomic"));
    assert!(problem(vec![audio(9)]).contains("not atomic"));
    assert!(problem(vec![audio(3), audio(3)]).contains("twice"));
    assert!(problem(vec![MediaInput { width: 0, ..audio(3) }]).contains("no width"));
    let takes_none = MediaInput { max_call_tokens: Some(0), ..audio(3) };
    assert!(problem(vec![takes_none]).contains("takes no tokens"));
}

#[test]
fn items_are_encoded_one_by_one_or_all_in_one_call_within_the_limit_of_the_encoder() {
    let item = |tokens| {
        let runs = vec![pb::MediaRun { first: 0, tokens }];
        pb::MediaItem { kind: pb::MediaKind::Audio.into(), runs, ..pb::MediaItem::default() }
    };
    let items = [item(2), item(5), item(3)];
    let call = |items: std::ops::Range<usize>, tokens| EncoderCall {
        walk: WalkId(3),
        items: items.collect(),
        tokens,
    };
    let calls = |encoded_together, max_call_tokens| {
        let input = MediaInput { encoded_together, max_call_tokens, ..audio(3) };
        let calls = omni().with_media(vec![input]).unwrap().encoder_calls(&items);
        calls.map_err(|error| format!("{}: {error}", error.field()))
    };
    let (alone, joint) = (vec![call(0..1, 2), call(1..2, 5), call(2..3, 3)], vec![call(0..3, 10)]);
    assert_eq!((calls(false, None), calls(false, Some(5))), (Ok(alone.clone()), Ok(alone)));
    assert_eq!((calls(true, None), calls(true, Some(10))), (Ok(joint.clone()), Ok(joint)));
    let refused = |field: &str, tokens: usize, limit: usize| {
        Err(format!(
            "{field}: {tokens} tokens are encoded in one call, but the encoder takes at most {limit}"
        ))
    };
    assert_eq!(calls(false, Some(4)), refused("media[1]", 5, 4));
    assert_eq!(calls(true, Some(9)), refused("media", 10, 9));
    assert_eq!(thinker().encoder_calls(&items), Err(EncoderCallError::NoInput { item: 0 }));
    let calls = omni().with_media(vec![MediaInput { encoded_together: true, ..audio(3) }]).unwrap();
    assert_eq!(calls.encoder_calls(&[]), Ok(vec![]));
}

#[test]
fn a_walk_batched_by_a_decode_walk_is_refused() {
    let mut message = pb::ModelDeclaration::from(&thinker());
    message.walks[0].batched_by = Some(1);
    let expected = DeclarationError::NotMixed { walk: "prefill_text".into(), by: 1 };
    assert_eq!(ModelDeclaration::try_from(message), Err(expected));
}

#[test]
fn a_walk_over_an_undeclared_node_is_refused() {
    let mut message = pb::ModelDeclaration::from(&thinker());
    message.walks[1].nodes = vec![7];
    let expected = DeclarationError::UnknownNode { walk: "thinker_decode".into(), node: 7, nodes: 1 };
    assert_eq!(ModelDeclaration::try_from(message), Err(expected));
}

#[test]
fn sizes_of_pages_and_slots_are_sums_over_the_planes() {
    let planes =
        vec![slot("state", 96), paged("kv", 128, 1, 8), paged("far", 128, 128, 5), slot("window", 4)];
    let model = with_planes(planes).unwrap();
    assert_eq!((model.page_tokens(), model.has_slots()), (Some(128), true));
    assert_eq!((model.page_bytes(), model.slot_bytes()), (128 * 8 + 5, 100));
    let encoder = with_planes(vec![]).unwrap();
    assert_eq!((encoder.page_tokens(), encoder.has_slots()), (None, false));
    assert_eq!((encoder.page_bytes(), encoder.slot_bytes()), (0, 0));
}

#[test]
fn planes_that_no_pool_can_hold_are_refused() {
    for (planes, expected) in [
        (vec![slot("a", 1), paged("a", 16, 1, 1)], "declared twice"),
        (vec![slot("a", 0)], "no bytes"),
        (vec![paged("a", 16, 1, 0)], "no bytes"),
        (vec![paged("a", 0, 1, 1)], "no tokens"),
        (vec![paged("a", 16, 0, 1)], "does not divide"),
        (vec![paged("a", 16, 3, 1)], "does not divide"),
        (vec![paged("a", 16, 32, 1)], "does not divide"),
        (vec![paged("a", 16, 1, 1), slot("b", 1), paged("c", 32, 1, 1)], "another number of tokens"),
        (vec![paged("a", u32::MAX, 1, u64::MAX)], "larger than any memory"),
        (vec![slot("a", 1 << 62), slot("b", 1 << 62)], "larger than any memory"),
    ] {
        let refused = with_planes(planes).unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
}

#[test]
fn a_message_with_a_plane_of_no_kind_or_of_a_bad_size_is_refused() {
    let mut message = pb::ModelDeclaration::from(&thinker());
    message.planes[0].kind = None;
    let expected = DeclarationError::NoPlaneKind { plane: "kv".into() };
    assert_eq!(ModelDeclaration::try_from(message.clone()), Err(expected));
    let plane =
        pb::PagedPlane { page_tokens: u32::MAX, ratio: 0, bytes_per_entry: u64::MAX, element_type: 9 };
    message.planes[0].kind = Some(pb::plane::Kind::Paged(plane));
    assert!(matches!(ModelDeclaration::try_from(message), Err(DeclarationError::Plane { .. })));
}
