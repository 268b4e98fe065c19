//! A model's declaration of its nodes, walks and planes, checked once and then held by types.

use std::fmt;

use crate::cluster::v1 as pb;

/// A node's place in its model's declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

/// A walk's place in its model's declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WalkId(pub u32);

impl fmt::Display for WalkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How a walk may be cut and batched. Nothing else in Tutti tells walks apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WalkKind {
    /// A prefill that may be cut at any token; its rows run under `batched_by`.
    Chunkable {
        /// The mixed walk that batches it.
        batched_by: WalkId,
    },
    /// A prefill that runs whole; its rows run under `batched_by`.
    Atomic {
        /// The mixed walk that batches it.
        batched_by: WalkId,
    },
    /// One token a pass; a step of decodes alone runs under this walk itself, any other under `batched_by`.
    Decode {
        /// The mixed walk that batches it.
        batched_by: WalkId,
    },
    /// Batches rows of the walks that name it.
    Mixed,
}

/// A named pass over nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Walk {
    /// The name used in logs, traces and topology files.
    pub name: String,
    /// The nodes it passes, in order.
    pub nodes: Vec<NodeId>,
    /// How it may be cut and batched.
    pub kind: WalkKind,
}

/// One kind of per-request state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plane {
    /// The name used in logs.
    pub name: String,
    /// What it holds.
    pub kind: PlaneKind,
}

/// The kinds of per-request state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlaneKind {
    /// Keys and values in pages that a block table names.
    PagedKv {
        /// Tokens a page.
        page_tokens: u32,
        /// Bytes a token, over all layers, keys and values.
        bytes_per_token: u64,
    },
}

/// A model's nodes, walks and planes; every index in it is known to be in range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelDeclaration {
    nodes: Vec<String>,
    walks: Vec<Walk>,
    planes: Vec<Plane>,
}

/// Why a declaration does not hold together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeclarationError {
    /// A walk names a node that is not declared.
    #[error("walk {walk:?} passes node {node}, but {nodes} nodes are declared")]
    UnknownNode {
        /// The walk's name.
        walk: String,
        /// The index it gave.
        node: u32,
        /// How many there are.
        nodes: usize,
    },
    /// A walk is batched by something that is not a mixed walk.
    #[error("walk {walk:?} is batched by walk {by}, which is not a mixed walk")]
    NotMixed {
        /// The walk's name.
        walk: String,
        /// The index it gave.
        by: u32,
    },
    /// A message lacks a walk's kind, or `batched_by` where the kind needs it.
    #[error("walk {walk:?} has no valid kind")]
    NoKind {
        /// The walk's name.
        walk: String,
    },
    /// A message lacks a plane's kind.
    #[error("plane {plane:?} has no kind")]
    NoPlaneKind {
        /// The plane's name.
        plane: String,
    },
}

impl ModelDeclaration {
    /// Checks that every index is in range and that every `batched_by` is a mixed walk.
    pub fn new(nodes: Vec<String>, walks: Vec<Walk>, planes: Vec<Plane>) -> Result<Self, DeclarationError> {
        for walk in &walks {
            if let Some(node) = walk.nodes.iter().find(|n| n.0 as usize >= nodes.len()) {
                let (walk, nodes) = (walk.name.clone(), nodes.len());
                return Err(DeclarationError::UnknownNode { walk, node: node.0, nodes });
            }
            if let Some(by) = walk.kind.batched_by()
                && !matches!(walks.get(by.0 as usize), Some(Walk { kind: WalkKind::Mixed, .. }))
            {
                return Err(DeclarationError::NotMixed { walk: walk.name.clone(), by: by.0 });
            }
        }
        Ok(Self { nodes, walks, planes })
    }

    /// The nodes' names; a [`NodeId`] is an index into them.
    pub fn nodes(&self) -> &[String] {
        &self.nodes
    }

    /// The walks; a [`WalkId`] is an index into them.
    pub fn walks(&self) -> &[Walk] {
        &self.walks
    }

    /// The planes every request of this model owns.
    pub fn planes(&self) -> &[Plane] {
        &self.planes
    }

    /// The walk of this id, if it is declared.
    pub fn walk(&self, id: WalkId) -> Option<&Walk> {
        self.walks.get(id.0 as usize)
    }

    /// The first walk that `wanted` accepts.
    pub fn find_walk(&self, wanted: impl Fn(&Walk) -> bool) -> Option<WalkId> {
        self.walks.iter().position(wanted).map(|i| WalkId(i as u32))
    }
}

impl WalkKind {
    /// The mixed walk that batches this one; none for a mixed walk itself.
    pub fn batched_by(self) -> Option<WalkId> {
        match self {
            Self::Chunkable { batched_by } | Self::Atomic { batched_by } | Self::Decode { batched_by } => {
                Some(batched_by)
            }
            Self::Mixed => None,
        }
    }
}

impl From<&ModelDeclaration> for pb::ModelDeclaration {
    fn from(declaration: &ModelDeclaration) -> Self {
        let walk = |walk: &Walk| pb::Walk {
            name: walk.name.clone(),
            nodes: walk.nodes.iter().map(|n| n.0).collect(),
            kind: match walk.kind {
                WalkKind::Chunkable { .. } => pb::WalkKind::Chunkable,
                WalkKind::Atomic { .. } => pb::WalkKind::Atomic,
                WalkKind::Decode { .. } => pb::WalkKind::Decode,
                WalkKind::Mixed => pb::WalkKind::Mixed,
            }
            .into(),
            batched_by: walk.kind.batched_by().map(|w| w.0),
        };
        let plane = |plane: &Plane| {
            let PlaneKind::PagedKv { page_tokens, bytes_per_token } = plane.kind;
            let kind = pb::plane::Kind::PagedKv(pb::PagedKvPlane { page_tokens, bytes_per_token });
            pb::Plane { name: plane.name.clone(), kind: Some(kind) }
        };
        Self {
            nodes: declaration.nodes.iter().map(|name| pb::Node { name: name.clone() }).collect(),
            walks: declaration.walks.iter().map(walk).collect(),
            planes: declaration.planes.iter().map(plane).collect(),
        }
    }
}

impl TryFrom<pb::ModelDeclaration> for ModelDeclaration {
    type Error = DeclarationError;

    fn try_from(message: pb::ModelDeclaration) -> Result<Self, DeclarationError> {
        let walk = |walk: pb::Walk| {
            let kind = match (walk.kind(), walk.batched_by.map(WalkId)) {
                (pb::WalkKind::Chunkable, Some(batched_by)) => WalkKind::Chunkable { batched_by },
                (pb::WalkKind::Atomic, Some(batched_by)) => WalkKind::Atomic { batched_by },
                (pb::WalkKind::Decode, Some(batched_by)) => WalkKind::Decode { batched_by },
                (pb::WalkKind::Mixed, None) => WalkKind::Mixed,
                _ => return Err(DeclarationError::NoKind { walk: walk.name }),
            };
            Ok(Walk { kind, name: walk.name, nodes: walk.nodes.into_iter().map(NodeId).collect() })
        };
        let plane = |plane: pb::Plane| match plane.kind {
            Some(pb::plane::Kind::PagedKv(kv)) => Ok(Plane {
                name: plane.name,
                kind: PlaneKind::PagedKv { page_tokens: kv.page_tokens, bytes_per_token: kv.bytes_per_token },
            }),
            None => Err(DeclarationError::NoPlaneKind { plane: plane.name }),
        };
        Self::new(
            message.nodes.into_iter().map(|n| n.name).collect(),
            message.walks.into_iter().map(walk).collect::<Result<_, _>>()?,
            message.planes.into_iter().map(plane).collect::<Result<_, _>>()?,
        )
    }
}

#[cfg(test)]
mod tests {
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
            vec![Plane {
                name: "kv".into(),
                kind: PlaneKind::PagedKv { page_tokens: 16, bytes_per_token: 512 },
            }],
        )
        .unwrap()
    }

    #[test]
    fn a_declaration_survives_the_wire() {
        let sent = thinker();
        assert_eq!(ModelDeclaration::try_from(pb::ModelDeclaration::from(&sent)), Ok(sent));
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
}
