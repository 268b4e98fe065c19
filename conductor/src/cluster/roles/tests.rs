use tutti_proto::declaration::{MediaForm, MediaInput, Walk};

use super::*;

const TEXT: TextWalks = TextWalks { prefill: WalkId(1), decode: WalkId(2) };

fn model() -> ModelDeclaration {
    let batched_by = WalkId(3);
    let walk = |name: &str, nodes: &[u32], kind| Walk {
        name: name.into(),
        nodes: nodes.iter().copied().map(NodeId).collect(),
        kind,
    };
    let walks = vec![
        walk("prefill_audio", &[0], WalkKind::Atomic { batched_by }),
        walk("prefill_text", &[1], WalkKind::Chunkable { batched_by }),
        walk("thinker_decode", &[1], WalkKind::Decode { batched_by }),
        walk("thinker_step", &[1], WalkKind::Mixed),
    ];
    let audio = MediaInput {
        kind: pb::MediaKind::Audio,
        walk: WalkId(0),
        placeholder: 7,
        form: MediaForm::Bytes { per_token: 4 },
        width: 8,
        formats: vec!["wav".into()],
        encoded_together: false,
        max_call_tokens: None,
    };
    let nodes = vec!["audio_encoder".into(), "thinker".into()];
    ModelDeclaration::new(nodes, walks, vec![]).unwrap().with_media(vec![audio]).unwrap()
}

fn group(nodes: Option<&[&str]>, walks: Option<&[&str]>) -> GroupSpec {
    let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    let (nodes, walks) = (nodes.map(owned), walks.map(owned));
    GroupSpec { name: "g".into(), nodes, walks, tp: 1, replicas: 1, spawned: true }
}

fn found(groups: &[GroupSpec]) -> Result<Vec<Duties>, String> {
    roles(&Topology::new(groups.to_vec()), &model(), TEXT).map_err(|error| error.to_string())
}

#[test]
fn roles_follow_from_the_walks() {
    let (all, prefill) = (group(None, None), group(None, Some(&["prefill_text"])));
    let decode = group(Some(&["thinker"]), Some(&["thinker_decode"]));
    let thinker = group(Some(&["thinker"]), None);
    let everything = Duties { encodes: true, ..GroupRole::Whole.into() };
    let expected = [everything, GroupRole::Whole.into()];
    assert_eq!(found(&[all.clone(), thinker.clone()]), Ok(expected.to_vec()));
    let expected = [GroupRole::Prefill.into(), GroupRole::Decode.into(), everything];
    assert_eq!(found(&[prefill.clone(), decode.clone(), all]), Ok(expected.to_vec()));
    let encoder = group(Some(&["audio_encoder"]), None);
    assert_eq!(
        found(&[encoder.clone(), thinker]),
        Ok(vec![GroupRole::Encode.into(), GroupRole::Whole.into()])
    );
    let by_walk = group(None, Some(&["prefill_audio"]));
    let expected: Vec<Duties> =
        [GroupRole::Encode, GroupRole::Prefill, GroupRole::Decode].map(Duties::from).into();
    assert_eq!(found(&[by_walk, prefill, decode.clone()]), Ok(expected));
    let prefill = group(None, Some(&["prefill_text", "prefill_audio"]));
    let expected = [Duties { encodes: true, ..GroupRole::Prefill.into() }, GroupRole::Decode.into()];
    assert_eq!(found(&[prefill, decode]), Ok(expected.to_vec()));
}

#[test]
fn unknown_names_and_incomplete_groups_are_refused() {
    for (groups, expected) in [
        (
            vec![group(None, Some(&["prefill_txt"]))],
            "no walk \"prefill_txt\"; it has prefill_audio, prefill_text",
        ),
        (vec![group(Some(&["talker"]), None)], "no node \"talker\"; it has audio_encoder, thinker"),
        (vec![group(Some(&["thinker"]), Some(&["prefill_audio"]))], "passes node \"audio_encoder\""),
        (vec![group(None, Some(&["thinker_step"]))], "only batches others"),
        (vec![group(Some(&["audio_encoder"]), None)], "no group runs the rest"),
        (vec![group(Some(&["thinker"]), None)], "runs prefill_audio, which the model's media pass"),
        (
            vec![
                GroupSpec { tp: 2, ..group(Some(&["audio_encoder"]), None) },
                group(Some(&["thinker"]), None),
            ],
            "tp: is 2, but encoders",
        ),
        (
            vec![group(None, None), group(None, Some(&["prefill_text"]))],
            "no other group runs only thinker_decode",
        ),
        (vec![group(None, Some(&["thinker_decode"]))], "no other group runs only prefill_text"),
    ] {
        let error = found(&groups).unwrap_err();
        assert!(error.contains(expected) && error.contains("topology: group \"g\""), "{error}");
    }
}
