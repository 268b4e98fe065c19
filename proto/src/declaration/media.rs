//! Media that a model accepts, and the division of a request's items into calls of encoders.

use std::ops::Range;

use super::{ModelDeclaration, WalkId};
use crate::cluster::v1 as pb;

/// A kind of media that a model accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaInput {
    /// The kind of media.
    pub kind: pb::MediaKind,
    /// The atomic walk that encodes media items. It returns one embedding for each of an item's tokens.
    pub walk: WalkId,
    /// The token id that a prompt has at each position of a media item.
    pub placeholder: u32,
    /// Bytes of an item's data per token, at least 1. The last token may cover fewer bytes.
    pub bytes_per_token: u32,
    /// Elements per embedding.
    pub width: u32,
    /// Names of the data formats that the model accepts.
    pub formats: Vec<String>,
    /// True if one call of the encoder takes all items of a request, because the embeddings of an item depend on the
    /// other items.
    pub encoded_together: bool,
    /// Maximum number of tokens per call of the encoder, at least 1. `None` if the encoder has no limit.
    pub max_call_tokens: Option<u32>,
}

impl MediaInput {
    /// Number of tokens of an item of `bytes` bytes.
    pub fn tokens(&self, bytes: usize) -> usize {
        bytes.div_ceil(self.bytes_per_token.max(1) as usize)
    }
}

/// One call of an encoder for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncoderCall {
    /// The walk that the call runs.
    pub walk: WalkId,
    /// Indices of the call's items.
    pub items: Range<usize>,
    /// Number of tokens of the call's items.
    pub tokens: usize,
}

/// The reason why a request's items cannot be divided into calls.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncoderCallError {
    /// The model does not accept the kind of an item.
    #[error("is of a kind that the model does not take")]
    NoInput {
        /// Index of the item.
        item: usize,
    },
    /// An item of another kind stands between two items that must be encoded together.
    #[error("is separated from the items that it is encoded together with")]
    Interrupted {
        /// Index of the second of these two items.
        item: usize,
    },
    /// A call has more tokens than the encoder takes.
    #[error("{} tokens are encoded in one call, but the encoder takes at most {limit}", call.tokens)]
    TooLarge {
        /// The call with too many tokens.
        call: EncoderCall,
        /// The encoder's limit in tokens.
        limit: u32,
    },
}

impl EncoderCallError {
    /// The request's field at fault: one item, or all items if a call encodes several.
    pub fn field(&self) -> String {
        match self {
            Self::NoInput { item } | Self::Interrupted { item } => format!("media[{item}]"),
            Self::TooLarge { call, .. } if call.items.len() == 1 => format!("media[{}]", call.items.start),
            Self::TooLarge { .. } => "media".into(),
        }
    }
}

impl ModelDeclaration {
    /// Divides a request's items into calls of encoders, in order: one call per item, or one call for all items of an
    /// input that is [encoded together](MediaInput::encoded_together).
    pub fn encoder_calls(&self, items: &[pb::MediaItem]) -> Result<Vec<EncoderCall>, EncoderCallError> {
        let mut calls: Vec<EncoderCall> = Vec::new();
        for (index, item) in items.iter().enumerate() {
            let input = self.media_input(item.kind()).ok_or(EncoderCallError::NoInput { item: index })?;
            let (walk, tokens) = (input.walk, item.tokens as usize);
            let others = calls.iter().rposition(|call| input.encoded_together && call.walk == walk);
            match others {
                Some(call) if call + 1 == calls.len() => {
                    calls[call].items.end = index + 1;
                    calls[call].tokens += tokens;
                }
                Some(_) => return Err(EncoderCallError::Interrupted { item: index }),
                None => calls.push(EncoderCall { walk, items: index..index + 1, tokens }),
            }
        }
        for call in &calls {
            let input = self.media.iter().find(|input| input.walk == call.walk);
            if let Some(limit) = input.and_then(|input| input.max_call_tokens)
                && call.tokens > limit as usize
            {
                return Err(EncoderCallError::TooLarge { call: call.clone(), limit });
            }
        }
        Ok(calls)
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
            encoded_together: input.encoded_together,
            max_call_tokens: input.max_call_tokens,
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
            encoded_together: message.encoded_together,
            max_call_tokens: message.max_call_tokens,
        }
    }
}
