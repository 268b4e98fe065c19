//! What each group of a topology is for, found by what the model declares: which walks of a request it runs.

use std::collections::BTreeSet;

use tutti_proto::{
    cluster::v1 as pb,
    walks::{ModelDeclaration, NodeId, WalkId, WalkKind},
};
use tutti_runtime::Error;

use super::topology::{GroupSpec, Topology};
use crate::request::TextWalks;

/// Which part of a request a group of workers runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// All of it.
    Whole,
    /// The prefill, which it hands over.
    Prefill,
    /// The decode of what it is handed.
    Decode,
}

impl Role {
    pub const ALL: [Self; 3] = [Self::Whole, Self::Prefill, Self::Decode];

    /// In metrics and messages.
    pub fn label(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

impl From<Role> for pb::WorkerRole {
    fn from(role: Role) -> Self {
        match role {
            Role::Whole => Self::WholeRequest,
            Role::Prefill => Self::PrefillApart,
            Role::Decode => Self::DecodeApart,
        }
    }
}

/// The role of each group, in order. Refuses a topology that the model cannot be served with, with the group and the key
/// at fault.
pub fn roles(topology: &Topology, model: &ModelDeclaration, text: TextWalks) -> Result<Vec<Role>, Error> {
    let roles = topology.groups().iter().map(|group| {
        let walks = served(group, model).map_err(|why| refused(group, &why))?;
        match (walks.contains(&text.prefill), walks.contains(&text.decode)) {
            (true, true) => Ok(Role::Whole),
            (true, false) => Ok(Role::Prefill),
            (false, true) => Ok(Role::Decode),
            (false, false) => Err(refused(group, "walks: no request for text passes any of them")),
        }
    });
    let roles = roles.collect::<Result<Vec<Role>, Error>>()?;
    for (apart, other, walk) in
        [(Role::Prefill, Role::Decode, text.decode), (Role::Decode, Role::Prefill, text.prefill)]
    {
        let alone = roles.iter().position(|role| *role == apart).filter(|_| !roles.contains(&other));
        if let Some(group) = alone.and_then(|place| topology.groups().get(place)) {
            let walk = model.walk(walk).map_or("", |walk| &walk.name);
            let why = format!("walks: it is for the {} alone, and no group runs {walk} apart", apart.label());
            return Err(refused(group, &why));
        }
    }
    Ok(roles)
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
    let place = model.nodes().iter().position(|node| node == name);
    place
        .map(|place| NodeId(place as u32))
        .ok_or_else(|| format!("nodes: the model has no node {name:?}; it has {}", model.nodes().join(", ")))
}

#[cfg(test)]
mod tests {
    use tutti_proto::walks::Walk;

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
            walk("prefill_audio", &[0, 1], WalkKind::Atomic { batched_by }),
            walk("prefill_text", &[1], WalkKind::Chunkable { batched_by }),
            walk("thinker_decode", &[1], WalkKind::Decode { batched_by }),
            walk("thinker_step", &[1], WalkKind::Mixed),
        ];
        ModelDeclaration::new(vec!["audio_encoder".into(), "thinker".into()], walks, vec![]).unwrap()
    }

    fn group(nodes: Option<&[&str]>, walks: Option<&[&str]>) -> GroupSpec {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let (nodes, walks) = (nodes.map(owned), walks.map(owned));
        GroupSpec { name: "g".into(), nodes, walks, tp: 1, replicas: 1, spawned: true }
    }

    fn found(groups: &[GroupSpec]) -> Result<Vec<Role>, String> {
        roles(&Topology::new(groups.to_vec()), &model(), TEXT).map_err(|error| error.to_string())
    }

    #[test]
    fn roles_follow_from_the_walks() {
        let (all, prefill) = (group(None, None), group(None, Some(&["prefill_text"])));
        let decode = group(Some(&["thinker"]), Some(&["thinker_decode"]));
        let thinker = group(Some(&["thinker"]), None);
        assert_eq!(found(&[all.clone(), thinker]), Ok(vec![Role::Whole, Role::Whole]));
        assert_eq!(found(&[prefill, decode, all]), Ok(vec![Role::Prefill, Role::Decode, Role::Whole]));
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
            (vec![group(Some(&["audio_encoder"]), None)], "no request for text"),
            (
                vec![group(None, None), group(None, Some(&["prefill_text"]))],
                "no group runs thinker_decode apart",
            ),
            (vec![group(None, Some(&["thinker_decode"]))], "no group runs prefill_text apart"),
        ] {
            let error = found(&groups).unwrap_err();
            assert!(error.contains(told) && error.contains("topology: group \"g\""), "{error}");
        }
    }
}
