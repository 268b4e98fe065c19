use super::*;

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
        vec![Plane { name: "kv".into(), kind: PlaneKind::PagedKv { page_tokens: 16, bytes_per_token: 512 } }],
    )
    .unwrap()
}

fn audio(walk: u32) -> MediaInput {
    let (kind, walk, formats) = (pb::MediaKind::Audio, WalkId(walk), vec!["wav".into()]);
    MediaInput { kind, walk, placeholder: 7, bytes_per_token: 64, width: 8, formats }
}

fn omni() -> ModelDeclaration {
    let mut walks = thinker().walks;
    let kind = WalkKind::Atomic { batched_by: WalkId(2) };
    walks.push(Walk { name: "prefill_audio".into(), nodes: vec![NodeId(1)], kind });
    ModelDeclaration::new(vec!["thinker".into(), "audio_encoder".into()], walks, vec![]).unwrap()
}

#[test]
fn a_declaration_survives_the_wire() {
    for sent in [thinker(), omni().with_media(vec![audio(3)]).unwrap()] {
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
    assert_eq!((audio(3).tokens(1), audio(3).tokens(64), audio(3).tokens(65)), (1, 1, 2));
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
