use tutti_proto::{
    cluster::v1::MediaKind,
    declaration::{MediaForm, MediaInput, NodeId, Walk, WalkId, WalkKind},
};

use super::*;

fn shape(shapes: &str, tokens: usize, logit_rows: usize) -> Option<(usize, usize)> {
    let shapes: ChunkShapes = shapes.parse().unwrap_or_else(|why| panic!("{why}"));
    shape_of(Some(&shapes), tokens, logit_rows).map(|shape| (shape.tokens, shape.logit_rows))
}

#[test]
fn tokens_and_logit_rows_have_the_smallest_shape_that_has_room() {
    for (tokens, logit_rows, expected) in
        [(1, 1, (8, 8)), (8, 8, (8, 8)), (9, 1, (32, 8)), (32, 9, (32, 32)), (32, 0, (32, 0))]
    {
        assert_eq!(
            shape("8,32", tokens, logit_rows),
            Some(expected),
            "{tokens} tokens, {logit_rows} logit rows"
        );
    }
    assert_eq!(shape("8,32", 33, 1), None);
    assert_eq!(shape_of(None, 1, 1), None);
}

#[test]
fn shapes_of_encoders_must_hold_a_full_call() {
    let refusal = |shapes: &str, max_call_tokens: Option<u32>| {
        let model = declared(max_call_tokens);
        let shapes: ChunkShapes = shapes.parse().unwrap();
        check_encoder_shapes(Some(&shapes), &model).err().map(|error| error.to_string())
    };
    assert_eq!(refusal("16,64", Some(64)), None);
    let small =
        "encoder_shapes: has no shape above 63, but a call of the encoder of audio has up to 64 tokens";
    assert_eq!(refusal("16,63", Some(64)).as_deref(), Some(small));
    let large = refusal("16,65", Some(64)).unwrap();
    assert!(large.contains("has a shape of 65") && large.contains("calls of 64 tokens"), "{large}");
    assert!(refusal("16", None).unwrap().contains("no limit of tokens"));
    assert!(check_encoder_shapes(None, &declared(None)).is_ok());
}

/// A model that takes sound.
fn declared(max_call_tokens: Option<u32>) -> ModelDeclaration {
    let node = || vec![NodeId(0)];
    let walk = |name: &str, nodes, kind| Walk { name: name.into(), nodes, kind };
    let batched_by = WalkId(2);
    let walks = vec![
        walk("prefill", node(), WalkKind::Chunkable { batched_by }),
        walk("decode", node(), WalkKind::Decode { batched_by }),
        walk("step", node(), WalkKind::Mixed),
        walk("encode", vec![NodeId(1)], WalkKind::Atomic { batched_by: WalkId(4) }),
        walk("encoders", vec![NodeId(1)], WalkKind::Mixed),
    ];
    let audio = MediaInput {
        kind: MediaKind::Audio,
        walk: WalkId(3),
        placeholder: 1,
        form: MediaForm::Bytes { per_token: 4 },
        width: 4,
        formats: vec!["wav".into()],
        encoded_together: true,
        max_call_tokens,
    };
    let nodes = vec!["thinker".into(), "encoder".into()];
    let declaration = ModelDeclaration::new(nodes, walks, vec![]).unwrap();
    declaration.with_media(vec![audio]).unwrap()
}
