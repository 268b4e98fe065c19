//! What each group of a topology is for, found by what the model declares: which walks of a request it runs.

use std::collections::BTreeSet;

use tutti_proto::{
    cluster::v1 as pb,
    declaration::{ModelDeclaration, NodeId, WalkId, WalkKind},
};
use tutti_runtime::Error;

use super::topology::{GroupSpec, Topology};
use crate::request::TextWalks;

/// Which part of a request a group of workers runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GroupRole {
    /// All of it.
    Whole,
    /// The prefill, which it hands over.
    Prefill,
    /// The decode of what it is handed.
    Decode,
    /// The encoding of its media, which it hands over. A group may do this beside one of the others.
    Encode,
}

impl GroupRole {
    pub const ALL: [Self; 4] = [Self::Whole, Self::Prefill, Self::Decode, Self::Encode];

    /// Before its label.
    pub fn article(self) -> &'static str {
        if self == Self::Encode { "an" } else { "a" }
    }

    /// In metrics and messages.
    pub fn label(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Encode => "encode",
        }
    }
}

/// All that a group is for: a part of the thinker's work, encoding, or both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Duties {
    /// Never `Encode`.
    pub thinks: Option<GroupRole>,
    pub encodes: bool,
}

impl Duties {
    pub fn include(self, role: GroupRole) -> bool {
        if role == GroupRole::Encode { self.encodes } else { self.thinks == Some(role) }
    }

    /// The one to be known by.
    pub fn main(self) -> Option<GroupRole> {
        self.thinks.or(self.encodes.then_some(GroupRole::Encode))
    }
}

impl From<GroupRole> for Duties {
    fn from(role: GroupRole) -> Self {
        Self { thinks: (role != GroupRole::Encode).then_some(role), encodes: role == GroupRole::Encode }
    }
}

impl From<GroupRole> for pb::WorkerRole {
    fn from(role: GroupRole) -> Self {
        match role {
            GroupRole::Whole => Self::WholeRequest,
            GroupRole::Prefill => Self::PrefillApart,
            GroupRole::Decode => Self::DecodeApart,
            GroupRole::Encode => Self::EncoderApart,
        }
    }
}

/// What each group is for, in order. Refuses a topology that the model cannot be served with, with the group and the key
/// at fault.
pub fn roles(topology: &Topology, model: &ModelDeclaration, text: TextWalks) -> Result<Vec<Duties>, Error> {
    let duties = topology.groups().iter().map(|group| {
        let walks = served(group, model).map_err(|why| refused(group, &why))?;
        let thinks = match (walks.contains(&text.prefill), walks.contains(&text.decode)) {
            (true, true) => Some(GroupRole::Whole),
            (true, false) => Some(GroupRole::Prefill),
            (false, true) => Some(GroupRole::Decode),
            (false, false) => None,
        };
        let encodes = encodes(group, &walks, model).map_err(|why| refused(group, &why))?;
        let duties = Duties { thinks, encodes };
        match duties.main() {
            None => Err(refused(group, "walks: no request passes any of them")),
            Some(GroupRole::Encode) if group.tp > 1 => {
                let why = format!("tp: is {}, but encoders are not divided among ranks", group.tp);
                Err(refused(group, &why))
            }
            Some(_) => Ok(duties),
        }
    });
    let duties = duties.collect::<Result<Vec<Duties>, Error>>()?;
    let has = |role| duties.iter().any(|duties| duties.include(role));
    if let Some(group) = topology.groups().first()
        && !duties.iter().any(|duties| duties.thinks.is_some())
    {
        return Err(refused(group, "nodes: they encode, and no group runs the rest of a request"));
    }
    for (disaggregated, other, walk) in [
        (GroupRole::Prefill, GroupRole::Decode, text.decode),
        (GroupRole::Decode, GroupRole::Prefill, text.prefill),
    ] {
        let alone = duties.iter().position(|duties| duties.include(disaggregated)).filter(|_| !has(other));
        if let Some(group) = alone.and_then(|index| topology.groups().get(index)) {
            let walk = model.walk(walk).map_or("", |walk| &walk.name);
            let why = format!(
                "walks: it runs only the {}, and no other group runs only {walk}",
                disaggregated.label()
            );
            return Err(refused(group, &why));
        }
    }
    if let (Some(input), Some(group)) = (model.media().first(), topology.groups().first())
        && !has(GroupRole::Encode)
    {
        let walk = model.walk(input.walk).map_or("", |walk| &walk.name);
        return Err(refused(
            group,
            &format!("nodes: neither it nor another group runs {walk}, which the model's media pass"),
        ));
    }
    Ok(duties)
}

/// Whether a group of these walks encodes media: all of them, or a request with several kinds would find no group.
fn encodes(group: &GroupSpec, walks: &BTreeSet<WalkId>, model: &ModelDeclaration) -> Result<bool, String> {
    let (some, missing): (Vec<_>, Vec<_>) =
        model.media().iter().partition(|input| walks.contains(&input.walk));
    match missing.first().and_then(|input| model.walk(input.walk)) {
        Some(missing) if !some.is_empty() => {
            let key = if group.nodes.is_some() { "nodes" } else { "walks" };
            Err(format!("{key}: it runs some encoders and not {}: encoders stay together", missing.name))
        }
        _ => Ok(!some.is_empty()),
    }
}

fn refused(group: &GroupSpec, why: &str) -> Error {
    Error::invalid("topology", format!("group {:?}: {why}", group.name))
}

/// The walks that a group runs.
fn served(group: &GroupSpec, model: &ModelDeclaration) -> Result<BTreeSet<WalkId>, String> {
    let nodes: BTreeSet<NodeId> = match &group.nodes {
        None => (0..model.nodes().len() as u32).map(NodeId).collect(),
        Some(names) => names.iter().map(|name| node(name, model)).collect::<Result<_, _>>()?,
    };
    let walks = || (0..).map(WalkId).zip(model.walks());
    let missing = |walk: WalkId| {
        let nodes = |passed: &&NodeId| !nodes.contains(passed);
        model.walk(walk)?.nodes.iter().find(nodes).and_then(|node| model.nodes().get(node.0 as usize))
    };
    let Some(names) = &group.walks else {
        return Ok(walks().map(|(id, _)| id).filter(|id| missing(*id).is_none()).collect());
    };
    let named = names.iter().map(|name| {
        let Some((id, walk)) = walks().find(|(_, walk)| walk.name == *name) else {
            let known: Vec<&str> = model.walks().iter().map(|walk| walk.name.as_str()).collect();
            return Err(format!("walks: the model has no walk {name:?}; it has {}", known.join(", ")));
        };
        if walk.kind == WalkKind::Mixed {
            return Err(format!("walks: {name:?} only batches others: name those that the group is to run"));
        }
        match missing(id) {
            Some(node) => Err(format!("nodes: walk {name:?} passes node {node:?}, which is not among them")),
            None => Ok(id),
        }
    });
    named.collect()
}

fn node(name: &str, model: &ModelDeclaration) -> Result<NodeId, String> {
    let index = model.nodes().iter().position(|node| node == name);
    index
        .map(|index| NodeId(index as u32))
        .ok_or_else(|| format!("nodes: the model has no node {name:?}; it has {}", model.nodes().join(", ")))
}

#[cfg(test)]
mod tests {
    use tutti_proto::declaration::{MediaInput, Walk};

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
            bytes_per_token: 4,
            width: 8,
            formats: vec![],
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
    fn what_the_model_does_not_have_is_refused_with_what_it_has() {
        for (groups, told) in [
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
            assert!(error.contains(told) && error.contains("topology: group \"g\""), "{error}");
        }
    }
}
