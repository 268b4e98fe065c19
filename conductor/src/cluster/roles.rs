//! Roles of a topology's groups. The roles follow from the walks that each group runs, among the walks that the model
//! declares.

use std::collections::BTreeSet;

use tutti_proto::{
    cluster::v1 as pb,
    declaration::{ModelDeclaration, NodeId, WalkId, WalkKind},
};
use tutti_runtime::Error;

use super::topology::{GroupSpec, Topology};
use crate::request::{GraphRole, TextWalks};

/// The part of a request that a group of workers runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GroupRole {
    /// The whole request.
    Whole,
    /// The prefill alone: the group hands each request over to a group that decodes.
    Prefill,
    /// The decode alone: the group continues requests that other groups have prefilled.
    Decode,
    /// The encoding of media. A group may encode in addition to one of the other roles.
    Encode,
}

impl GroupRole {
    pub const ALL: [Self; 4] = [Self::Whole, Self::Prefill, Self::Decode, Self::Encode];

    /// The indefinite article ("a" or "an") that goes before the label.
    pub fn article(self) -> &'static str {
        if self == Self::Encode { "an" } else { "a" }
    }

    /// Label in metrics and messages.
    pub fn label(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Encode => "encode",
        }
    }
}

/// All roles of a group: one part of the text generation, the encoding of media, or both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Duties {
    /// The group's part of the text generation; never `Encode`.
    pub thinks: Option<GroupRole>,
    pub encodes: bool,
}

impl Duties {
    pub fn include(self, role: GroupRole) -> bool {
        if role == GroupRole::Encode { self.encodes } else { self.thinks == Some(role) }
    }

    /// The role that status reports.
    pub fn main(self) -> Option<GroupRole> {
        self.thinks.or(self.encodes.then_some(GroupRole::Encode))
    }
}

impl From<GroupRole> for Duties {
    fn from(role: GroupRole) -> Self {
        Self { thinks: (role != GroupRole::Encode).then_some(role), encodes: role == GroupRole::Encode }
    }
}

impl From<GraphRole> for GroupRole {
    fn from(role: GraphRole) -> Self {
        match role {
            GraphRole::Whole => Self::Whole,
            GraphRole::Prefill => Self::Prefill,
            GraphRole::Decode => Self::Decode,
            GraphRole::Encode => Self::Encode,
        }
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

/// Returns the roles of each group, in the order of the topology. Refuses a topology that cannot serve the model, with
/// an error that names the group and the key at fault.
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

/// True if a group that runs `walks` encodes media. A group must encode all kinds of media or none, since one encoder
/// handles all media of a request.
fn encodes(group: &GroupSpec, walks: &BTreeSet<WalkId>, model: &ModelDeclaration) -> Result<bool, String> {
    let (some, missing): (Vec<_>, Vec<_>) =
        model.media().iter().partition(|input| walks.contains(&input.walk));
    match missing.first().and_then(|input| model.walk(input.walk)) {
        Some(missing) if !some.is_empty() => {
            let key = if group.nodes.is_some() { "nodes" } else { "walks" };
            Err(format!(
                "{key}: it runs some encoders and not {}: a group runs all encoders or none",
                missing.name
            ))
        }
        _ => Ok(!some.is_empty()),
    }
}

fn refused(group: &GroupSpec, why: &str) -> Error {
    Error::invalid("topology", format!("group {:?}: {why}", group.name))
}

/// Returns the walks that a group runs, or why the group's specification is refused.
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
mod tests;
