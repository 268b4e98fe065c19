//! Declarations of models whose thinker (the node that prefills and decodes) is a text model, real or simulated.

use tutti_proto::{
    cluster::v1::MediaKind,
    declaration::{
        DeclarationError, MediaForm, MediaInput, ModelDeclaration, NodeId, Plane, Walk, WalkId, WalkKind,
    },
};

use crate::{
    LoadError,
    config::{keys::Keys, ranges},
};

/// Name of the node that prefills and decodes.
pub(crate) const THINKER: &str = "thinker";
/// Name of the plane of keys and values.
pub(crate) const KV_PLANE: &str = "kv";
/// Name of the node that encodes sound.
pub(crate) const AUDIO_ENCODER: &str = "audio_encoder";
/// Name of the node that encodes images and videos.
pub(crate) const VISION_ENCODER: &str = "vision_encoder";

/// The conversion of audio to tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Audio {
    /// Token id in a prompt that stands for one token of an audio item.
    pub placeholder: u32,
    pub bytes_per_token: usize,
    /// Elements per embedding.
    pub width: usize,
    /// True if one call encodes all items of a request.
    pub encoded_together: bool,
    /// Maximum number of tokens per call of the encoder.
    pub max_call_tokens: Option<u32>,
}

impl Audio {
    /// Reads the conversion that a config declares. Embeddings have `width` elements. Returns `None` if the model takes
    /// no audio.
    pub fn read(keys: &Keys<'_>, width: usize) -> Result<Option<Self>, LoadError> {
        let (placeholder, bytes) = (keys.get(&ranges::AUDIO_TOKEN_ID)?, &ranges::AUDIO_BYTES_PER_TOKEN);
        let bytes_per_token = keys.get(bytes)?;
        let encoded_together = keys.get_or(&ranges::AUDIO_ENCODED_TOGETHER, false)?;
        let max_call_tokens = keys.get(&ranges::AUDIO_MAX_CALL_TOKENS)?;
        let Some(placeholder) = placeholder else { return Ok(None) };
        let bytes_per_token = bytes_per_token.ok_or_else(|| keys.missing(bytes))?;
        Ok(Some(Self { placeholder, bytes_per_token, width, encoded_together, max_call_tokens }))
    }
}

/// The nodes of the model that a worker holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldNodes<'a>(Option<&'a [String]>);

impl<'a> HeldNodes<'a> {
    /// Returns the nodes that `nodes` names; `None` means all nodes. Names that the model lacks are ignored here,
    /// because the conductor refuses them.
    pub fn of(nodes: Option<&'a [String]>) -> Self {
        Self(nodes)
    }

    /// True if the worker holds the node `name`.
    pub fn holds(self, name: &str) -> bool {
        self.0.is_none_or(|nodes| nodes.iter().any(|node| node == name))
    }

    /// True if the worker holds the thinker.
    pub fn thinker(self) -> bool {
        self.holds(THINKER)
    }

    /// True if `name` is asked for by name.
    pub fn names(self, name: &str) -> bool {
        self.0.is_some() && self.holds(name)
    }
}

/// An encoder in a model's declaration.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DeclaredEncoder {
    /// Name of the node.
    pub node: &'static str,
    /// The media that the encoder takes. Each kind has a walk of its own, because a walk names its kind.
    pub inputs: Vec<MediaInput>,
}

/// Declares a text model with one node and these planes. A mixed walk batches its prefill walk and its decode walk.
pub(crate) fn with_planes(planes: Vec<Plane>) -> Result<ModelDeclaration, DeclarationError> {
    let batched_by = WalkId(2);
    let walk = |name: &str, kind| Walk { name: name.into(), nodes: vec![NodeId(0)], kind };
    ModelDeclaration::new(
        vec![THINKER.into()],
        vec![
            walk("prefill_text", WalkKind::Chunkable { batched_by }),
            walk("thinker_decode", WalkKind::Decode { batched_by }),
            walk("thinker_step", WalkKind::Mixed),
        ],
        planes,
    )
}

/// Adds encoders to a text model's declaration, and sets the walks of their inputs. An encoder takes items one by one,
/// or all items of a request in one call. Its steps contain no other work. The thinker prefills the embeddings like
/// text, in chunks of any size.
pub(crate) fn with_encoders(
    text: &ModelDeclaration,
    encoders: Vec<DeclaredEncoder>,
) -> Result<ModelDeclaration, DeclarationError> {
    let (mut nodes, mut walks) = (text.nodes().to_vec(), text.walks().to_vec());
    let mut media = Vec::new();
    for DeclaredEncoder { node, inputs } in encoders {
        let passed = vec![NodeId(nodes.len() as u32)];
        nodes.push(node.into());
        // The mixed walk stands behind the walks that it batches.
        let batched_by = WalkId((walks.len() + inputs.len()) as u32);
        for input in inputs {
            let walk = WalkId(walks.len() as u32);
            let name = format!("prefill_{}", input.kind.as_str_name().to_lowercase());
            walks.push(Walk { name, nodes: passed.clone(), kind: WalkKind::Atomic { batched_by } });
            media.push(MediaInput { walk, ..input });
        }
        walks.push(Walk { name: format!("{node}_step"), nodes: passed, kind: WalkKind::Mixed });
    }
    ModelDeclaration::new(nodes, walks, text.planes().to_vec())?.with_media(media)
}

impl From<Audio> for DeclaredEncoder {
    fn from(audio: Audio) -> Self {
        let input = MediaInput {
            kind: MediaKind::Audio,
            walk: WalkId(0),
            placeholder: audio.placeholder,
            form: MediaForm::Bytes { per_token: audio.bytes_per_token as u32 },
            width: audio.width as u32,
            formats: vec!["wav".into()],
            encoded_together: audio.encoded_together,
            max_call_tokens: audio.max_call_tokens,
        };
        Self { node: AUDIO_ENCODER, inputs: vec![input] }
    }
}
