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

/// A kind of media that a model takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaInput {
    /// Which.
    pub kind: pb::MediaKind,
    /// The atomic walk that encodes an item. What it gives are the embeddings of the item's tokens.
    pub walk: WalkId,
    /// What a prompt holds in the place of each token of an item.
    pub placeholder: u32,
    /// Bytes of an item for each of its tokens, at least 1; the last one may stand for fewer.
    pub bytes_per_token: u32,
    /// Elements of a token's embedding.
    pub width: u32,
    /// The formats that its data may have.
    pub formats: Vec<String>,
}

impl MediaInput {
    /// How many tokens an item of so many bytes has.
    pub fn tokens(&self, bytes: usize) -> usize {
        bytes.div_ceil(self.bytes_per_token.max(1) as usize)
    }
}

/// A model's nodes, walks, planes and media; every index in it is known to be in range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelDeclaration {
    nodes: Vec<String>,
    walks: Vec<Walk>,
    planes: Vec<Plane>,
    media: Vec<MediaInput>,
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
    /// Media of a kind that is not known or declared twice, or that no atomic walk encodes.
    #[error("media {kind:?}: {problem}")]
    Media {
        /// As declared.
        kind: pb::MediaKind,
        /// What is wrong.
        problem: &'static str,
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
        Ok(Self { nodes, walks, planes, media: Vec::new() })
    }

    /// The same model, which takes these media too. Checks that each kind is there once, and that an atomic walk encodes it.
    pub fn with_media(self, media: Vec<MediaInput>) -> Result<Self, DeclarationError> {
        for (place, input) in media.iter().enumerate() {
            let atomic = matches!(self.walk(input.walk), Some(Walk { kind: WalkKind::Atomic { .. }, .. }));
            let problem = if input.kind == pb::MediaKind::Unspecified {
                "is of no kind known here"
            } else if media[..place].iter().any(|other| other.kind == input.kind) {
                "is declared twice"
            } else if !atomic {
                "is encoded by a walk that is not atomic"
            } else if input.bytes_per_token == 0 || input.width == 0 {
                "has tokens of no bytes, or embeddings of no width"
            } else {
                continue;
            };
            return Err(DeclarationError::Media { kind: input.kind, problem });
        }
        Ok(Self { media, ..self })
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

    /// What a prompt may hold beside text.
    pub fn media(&self) -> &[MediaInput] {
        &self.media
    }

    /// How the model takes media of this kind, if it does.
    pub fn media_input(&self, kind: pb::MediaKind) -> Option<&MediaInput> {
        self.media.iter().find(|input| input.kind == kind)
    }

    /// Whether this walk encodes media, and prefills nothing.
    pub fn encodes(&self, walk: WalkId) -> bool {
        self.media.iter().any(|input| input.walk == walk)
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
            media: declaration.media.iter().map(Into::into).collect(),
        }
    }
}

impl From<&MediaInput> for pb::MediaInput {
    fn from(input: &MediaInput) -> Self {
        Self {
            kind: input.kind.into(),
            walk: input.walk.0,
            placeholder_token_id: input.placeholder,
            bytes_per_token: input.bytes_per_token,
            width: input.width,
            formats: input.formats.clone(),
        }
    }
}

impl From<pb::MediaInput> for MediaInput {
    fn from(message: pb::MediaInput) -> Self {
        Self {
            kind: message.kind(),
            walk: WalkId(message.walk),
            placeholder: message.placeholder_token_id,
            bytes_per_token: message.bytes_per_token,
            width: message.width,
            formats: message.formats,
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
        )?
        .with_media(message.media.into_iter().map(Into::into).collect())
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
}
