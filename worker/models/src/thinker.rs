//! Declarations of models whose thinker (the node that prefills and decodes) is a text model, real or simulated.

use tutti_proto::{
    cluster::v1::{ElementType, MediaKind},
    declaration::{
        DeclarationError, MediaForm, MediaInput, ModelDeclaration, NodeId, Plane, PlaneKind, Walk, WalkId,
        WalkKind,
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
/// Name of the encoder node that [`with_audio`] adds.
pub(crate) const AUDIO_ENCODER: &str = "audio_encoder";

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
pub(crate) struct HeldNodes {
    pub thinker: bool,
    pub encoder: bool,
}

impl HeldNodes {
    /// Returns the nodes that `nodes` names; `None` means all nodes. Names that the model lacks are ignored here,
    /// because the conductor refuses them.
    pub fn of(nodes: Option<&[String]>) -> Self {
        let held = |name| nodes.is_none_or(|nodes| nodes.iter().any(|node| node == name));
        Self { thinker: held(THINKER), encoder: held(AUDIO_ENCODER) }
    }
}

/// Declares a text model with one node and one plane of paged keys and values. A mixed walk batches its prefill walk
/// and its decode walk.
pub(crate) fn declaration(
    page_tokens: usize,
    bytes_per_token: usize,
) -> Result<ModelDeclaration, DeclarationError> {
    let (page_tokens, bytes_per_entry) = (page_tokens as u32, bytes_per_token as u64);
    let element_type = ElementType::Unspecified;
    let kind = PlaneKind::Paged { page_tokens, ratio: 1, bytes_per_entry, element_type };
    with_planes(vec![Plane { name: KV_PLANE.into(), kind }])
}

/// Declares a text model with these planes.
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

/// Adds an encoder to a text model's declaration. The encoder takes items one by one, or all items of a request in one
/// call. The encoder's steps contain no other work. The thinker prefills the embeddings like text, in chunks of any
/// size.
pub(crate) fn with_audio(
    text: &ModelDeclaration,
    audio: Audio,
) -> Result<ModelDeclaration, DeclarationError> {
    let (mut nodes, mut walks) = (text.nodes().to_vec(), text.walks().to_vec());
    let encoder = vec![NodeId(nodes.len() as u32)];
    nodes.push(AUDIO_ENCODER.into());
    let walk = WalkId(walks.len() as u32);
    let batched_by = WalkId(walk.0 + 1);
    let kind = WalkKind::Atomic { batched_by };
    walks.push(Walk { name: "prefill_audio".into(), nodes: encoder.clone(), kind });
    walks.push(Walk { name: "audio_encoder_step".into(), nodes: encoder, kind: WalkKind::Mixed });
    let input = MediaInput {
        kind: MediaKind::Audio,
        walk,
        placeholder: audio.placeholder,
        form: MediaForm::Bytes { per_token: audio.bytes_per_token as u32 },
        width: audio.width as u32,
        formats: vec!["wav".into()],
        encoded_together: audio.encoded_together,
        max_call_tokens: audio.max_call_tokens,
    };
    ModelDeclaration::new(nodes, walks, text.planes().to_vec())?.with_media(vec![input])
}
