use tutti_proto::declaration::{NodeId, Walk};

use super::*;

fn walk(name: &str, nodes: &[u32], kind: WalkKind) -> Walk {
    Walk { name: name.into(), nodes: nodes.iter().copied().map(NodeId).collect(), kind }
}

#[test]
fn a_text_request_passes_no_encoder() {
    let batched_by = WalkId(3);
    let encoders = [WalkId(0)];
    let omni = ModelDeclaration::new(
        vec!["audio_encoder".into(), "thinker".into()],
        vec![
            walk("prefill_audio", &[0], WalkKind::Atomic { batched_by }),
            walk("prefill_text", &[1], WalkKind::Chunkable { batched_by }),
            walk("thinker_decode", &[1], WalkKind::Decode { batched_by }),
            walk("thinker_step", &[1], WalkKind::Mixed),
        ],
        vec![],
    );
    let text = TextWalks::of(&omni.unwrap()).unwrap();
    assert_eq!(text, TextWalks { prefill: WalkId(1), decode: WalkId(2) });
    let walks = |role: GraphRole| role.walks(text, &encoders);
    assert_eq!(walks(GraphRole::Whole), [1, 2]);
    assert_eq!(
        (walks(GraphRole::Prefill), walks(GraphRole::Decode), walks(GraphRole::Encode)),
        (vec![1], vec![2], vec![0])
    );
    assert_ne!(GraphRole::Prefill.id(), GraphRole::Decode.id());
    assert_ne!(GraphRole::Prefill.id(), GraphRole::Encode.id());
}

#[test]
fn a_model_without_a_decode_walk_is_refused() {
    let model = ModelDeclaration::new(vec!["n".into()], vec![walk("m", &[0], WalkKind::Mixed)], vec![]);
    assert!(TextWalks::of(&model.unwrap()).is_err());
}
