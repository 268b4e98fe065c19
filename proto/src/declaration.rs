//! A model's declaration of its nodes, walks, planes and media. The declaration is checked once, when it is
//! constructed.

mod media;

use std::fmt;

pub use self::media::{
    ClipInput, EncoderCall, EncoderCallError, MediaForm, MediaInput, MediaItemError, PixelCount, PixelInput,
    RunError, SoundSentinels, Timestamps, encoder_calls, media_tokens,
};
use crate::cluster::v1 as pb;

/// A node, which is a part of a model. The number is the node's index in the model's declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

/// A walk. The number is the walk's index in the model's declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WalkId(pub u32);

impl fmt::Display for WalkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The kind of a walk: how it may be cut and batched. Tutti knows nothing else about the meaning of a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WalkKind {
    /// A prefill that may be cut at any token. A step with rows of this walk runs as the walk `batched_by`.
    Chunkable {
        /// The mixed walk that batches rows of this walk.
        batched_by: WalkId,
    },
    /// A prefill that must not be cut. A step with rows of this walk runs as the walk `batched_by`.
    Atomic {
        /// The mixed walk that batches rows of this walk.
        batched_by: WalkId,
    },
    /// A decode of one token per forward pass. A step whose rows all have this walk runs as this walk. Any other step
    /// with rows of this walk runs as the walk `batched_by`.
    Decode {
        /// The mixed walk that batches rows of this walk.
        batched_by: WalkId,
    },
    /// The walk of a step that batches rows of the walks whose `batched_by` names it. No row has a mixed walk itself.
    Mixed,
}

/// A named pass over the model's nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Walk {
    /// The name used in logs, traces and topology files.
    pub name: String,
    /// The nodes that the walk passes, in order.
    pub nodes: Vec<NodeId>,
    /// The kind: how the walk may be cut and batched.
    pub kind: WalkKind,
}

/// One kind of state that each request has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plane {
    /// The name used in logs.
    pub name: String,
    /// The kind of state.
    pub kind: PlaneKind,
}

/// The kinds of state that a request may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlaneKind {
    /// State that grows with the request's tokens, in pages that a block table lists. A page of P tokens holds
    /// P / `ratio` entries.
    Paged {
        /// Tokens per page: the same for all paged planes of a model.
        page_tokens: u32,
        /// Tokens per entry; a divisor of `page_tokens`. 1 for the keys and values of each token, more for a compressed
        /// plane.
        ratio: u32,
        /// Bytes per entry, over all layers.
        bytes_per_entry: u64,
        /// Type of the elements.
        element_type: pb::ElementType,
    },
    /// State of a fixed size per request, such as that of a recurrent layer.
    Slot {
        /// Bytes per request, over all layers.
        bytes: u64,
    },
}

impl PlaneKind {
    /// Bytes per page. 0 for a slot plane. Saturates for a plane that [`ModelDeclaration::new`] refuses.
    pub fn page_bytes(&self) -> u64 {
        match *self {
            Self::Paged { page_tokens, ratio, bytes_per_entry, .. } => {
                u64::from(page_tokens / ratio.max(1)).saturating_mul(bytes_per_entry)
            }
            Self::Slot { .. } => 0,
        }
    }

    /// Bytes per request of a slot plane. 0 for a paged plane.
    pub fn slot_bytes(&self) -> u64 {
        match *self {
            Self::Paged { .. } => 0,
            Self::Slot { bytes } => bytes,
        }
    }
}

/// A model's nodes, walks, planes and media. Every index of a node or a walk is in range.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelDeclaration {
    nodes: Vec<String>,
    walks: Vec<Walk>,
    planes: Vec<Plane>,
    media: Vec<MediaInput>,
}

/// The reason why a declaration is inconsistent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeclarationError {
    /// A walk names a node that is not declared.
    #[error("walk {walk:?} passes node {node}, but {nodes} nodes are declared")]
    UnknownNode {
        /// The walk's name.
        walk: String,
        /// The node's index.
        node: u32,
        /// Number of declared nodes.
        nodes: usize,
    },
    /// A walk's `batched_by` is not a mixed walk.
    #[error("walk {walk:?} is batched by walk {by}, which is not a mixed walk")]
    NotMixed {
        /// The walk's name.
        walk: String,
        /// The value of `batched_by`.
        by: u32,
    },
    /// A protobuf message has a walk without a kind, or with a `batched_by` that does not fit the kind.
    #[error("walk {walk:?} has no valid kind")]
    NoKind {
        /// The walk's name.
        walk: String,
    },
    /// A protobuf message has a plane without a kind.
    #[error("plane {plane:?} has no kind")]
    NoPlaneKind {
        /// The plane's name.
        plane: String,
    },
    /// A plane is declared twice, its size is 0 or does not fit in 63 bits, or its pages do not match those of the
    /// planes before it.
    #[error("plane {plane:?} {problem}")]
    Plane {
        /// The plane's name.
        plane: String,
        /// The problem, as a predicate such as "is declared twice".
        problem: &'static str,
    },
    /// A media input is of an unknown kind, is declared twice, is not encoded by an atomic walk, or has a size or a
    /// limit of 0.
    #[error("media {kind:?}: {problem}")]
    Media {
        /// The declared kind.
        kind: pb::MediaKind,
        /// The problem, as a predicate such as "is declared twice".
        problem: &'static str,
    },
}

impl ModelDeclaration {
    /// Makes a declaration without media. Checks that every index is in range and that every `batched_by` is a mixed
    /// walk. Also checks that planes have different names, sizes above 0, and the same number of tokens per page.
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
        check_planes(&planes)?;
        Ok(Self { nodes, walks, planes, media: Vec::new() })
    }

    /// Adds media to the declaration. Checks that each kind is declared once and encoded by an atomic walk.
    pub fn with_media(self, media: Vec<MediaInput>) -> Result<Self, DeclarationError> {
        for (index, input) in media.iter().enumerate() {
            let atomic = matches!(self.walk(input.walk), Some(Walk { kind: WalkKind::Atomic { .. }, .. }));
            let problem = if input.kind == pb::MediaKind::Unspecified {
                "is of no kind known here"
            } else if media[..index].iter().any(|other| other.kind == input.kind) {
                "is declared twice"
            } else if !atomic {
                "is encoded by a walk that is not atomic"
            } else if let Some(problem) = input.problem() {
                problem
            } else {
                continue;
            };
            return Err(DeclarationError::Media { kind: input.kind, problem });
        }
        Ok(Self { media, ..self })
    }

    /// Names of the nodes, indexed by [`NodeId`].
    pub fn nodes(&self) -> &[String] {
        &self.nodes
    }

    /// The walks, indexed by [`WalkId`].
    pub fn walks(&self) -> &[Walk] {
        &self.walks
    }

    /// The planes that every request of this model has.
    pub fn planes(&self) -> &[Plane] {
        &self.planes
    }

    /// Tokens per page of every paged plane. `None` if the model has no paged plane.
    pub fn page_tokens(&self) -> Option<u32> {
        self.planes.iter().find_map(|plane| match plane.kind {
            PlaneKind::Paged { page_tokens, .. } => Some(page_tokens),
            PlaneKind::Slot { .. } => None,
        })
    }

    /// True if any plane is a slot plane, so that a request of this model has state of a fixed size.
    pub fn has_slots(&self) -> bool {
        self.planes.iter().any(|plane| matches!(plane.kind, PlaneKind::Slot { .. }))
    }

    /// Bytes per page, over all paged planes.
    pub fn page_bytes(&self) -> u64 {
        self.planes.iter().map(|plane| plane.kind.page_bytes()).sum()
    }

    /// Bytes per slot, over all slot planes.
    pub fn slot_bytes(&self) -> u64 {
        self.planes.iter().map(|plane| plane.kind.slot_bytes()).sum()
    }

    /// The media that a prompt may contain.
    pub fn media(&self) -> &[MediaInput] {
        &self.media
    }

    /// The declaration of media of this kind. `None` if the model does not accept this kind.
    pub fn media_input(&self, kind: pb::MediaKind) -> Option<&MediaInput> {
        self.media.iter().find(|input| input.kind == kind)
    }

    /// True if this walk encodes media. Such a walk prefills nothing.
    pub fn encodes(&self, walk: WalkId) -> bool {
        self.media.iter().any(|input| input.walk == walk)
    }

    /// The walk with this id. `None` if no such walk is declared.
    pub fn walk(&self, id: WalkId) -> Option<&Walk> {
        self.walks.get(id.0 as usize)
    }

    /// The first walk for which `wanted` is true.
    pub fn find_walk(&self, wanted: impl Fn(&Walk) -> bool) -> Option<WalkId> {
        self.walks.iter().position(wanted).map(|i| WalkId(i as u32))
    }
}

/// Checks that the planes can be allocated together. The sizes may come from a peer, so sums must not overflow.
fn check_planes(planes: &[Plane]) -> Result<(), DeclarationError> {
    let (mut tokens, mut bytes) = (None, 0_u64);
    for (index, plane) in planes.iter().enumerate() {
        bytes = bytes.saturating_add(plane.kind.page_bytes()).saturating_add(plane.kind.slot_bytes());
        let problem = if planes[..index].iter().any(|other| other.name == plane.name) {
            "is declared twice"
        } else if bytes > i64::MAX as u64 {
            "is larger than any memory"
        } else {
            match plane.kind {
                PlaneKind::Paged { bytes_per_entry: 0, .. } | PlaneKind::Slot { bytes: 0 } => "has no bytes",
                PlaneKind::Paged { page_tokens: 0, .. } => "has pages of no tokens",
                PlaneKind::Paged { page_tokens, ratio, .. } if ratio == 0 || page_tokens % ratio != 0 => {
                    "has a ratio that does not divide its page's tokens"
                }
                PlaneKind::Paged { page_tokens, .. } if *tokens.get_or_insert(page_tokens) != page_tokens => {
                    "has pages of another number of tokens than the planes before it"
                }
                PlaneKind::Paged { .. } | PlaneKind::Slot { .. } => continue,
            }
        };
        return Err(DeclarationError::Plane { plane: plane.name.clone(), problem });
    }
    Ok(())
}

impl WalkKind {
    /// The mixed walk that batches this walk. `None` for a mixed walk.
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
            let kind = match plane.kind {
                PlaneKind::Paged { page_tokens, ratio, bytes_per_entry, element_type } => {
                    let element_type = element_type.into();
                    pb::plane::Kind::Paged(pb::PagedPlane {
                        page_tokens,
                        ratio,
                        bytes_per_entry,
                        element_type,
                    })
                }
                PlaneKind::Slot { bytes } => pb::plane::Kind::Slot(pb::SlotPlane { bytes }),
            };
            pb::Plane { name: plane.name.clone(), kind: Some(kind) }
        };
        Self {
            nodes: declaration.nodes.iter().map(|name| pb::Node { name: name.clone() }).collect(),
            walks: declaration.walks.iter().map(walk).collect(),
            planes: declaration.planes.iter().map(plane).collect(),
            media: declaration.media.iter().map(Into::into).collect(),
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
        let plane = |plane: pb::Plane| {
            let kind = match plane.kind {
                Some(pb::plane::Kind::Paged(paged)) => {
                    let element_type = paged.element_type();
                    let pb::PagedPlane { page_tokens, ratio, bytes_per_entry, .. } = paged;
                    PlaneKind::Paged { page_tokens, ratio, bytes_per_entry, element_type }
                }
                Some(pb::plane::Kind::Slot(pb::SlotPlane { bytes })) => PlaneKind::Slot { bytes },
                None => return Err(DeclarationError::NoPlaneKind { plane: plane.name }),
            };
            Ok(Plane { name: plane.name, kind })
        };
        Self::new(
            message.nodes.into_iter().map(|n| n.name).collect(),
            message.walks.into_iter().map(walk).collect::<Result<_, _>>()?,
            message.planes.into_iter().map(plane).collect::<Result<_, _>>()?,
        )?
        .with_media(message.media.into_iter().map(Into::into).collect())
    }
}

#[cfg(test)]
mod tests;
