//! Media that a model accepts, and the division of a request's items into calls of encoders.

mod tokens;

pub use self::tokens::{MediaItemError, RunError, media_tokens};
use super::{ModelDeclaration, WalkId};
use crate::cluster::v1 as pb;

/// A kind of media that a model accepts.
#[derive(Clone, Debug, PartialEq)]
pub struct MediaInput {
    /// The kind of media.
    pub kind: pb::MediaKind,
    /// The atomic walk that encodes media items. It returns one row for each of an item's tokens.
    pub walk: WalkId,
    /// The token id that a prompt has at each position of a media item.
    pub placeholder: u32,
    /// Form of an item's data on the wire, from which the number of its tokens follows.
    pub form: MediaForm,
    /// Elements per row of a token: its embedding, and the features that deepstack adds behind further layers.
    pub width: u32,
    /// Names of the data formats that the model accepts. Empty unless the form is [`MediaForm::Bytes`].
    pub formats: Vec<String>,
    /// True if one call of the encoder takes all items of a request, because the embeddings of an item depend on the
    /// other items.
    pub encoded_together: bool,
    /// Maximum number of tokens per call of the encoder, at least 1. `None` if the encoder has no limit.
    pub max_call_tokens: Option<u32>,
}

/// Form of an item's data on the wire.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MediaForm {
    /// The client's bytes, in one of the input's formats.
    Bytes {
        /// Bytes per token. The last token may cover fewer.
        per_token: u32,
    },
    /// Sound: samples of one channel, f32 little-endian.
    Clips(ClipInput),
    /// Images and frames: red, green and blue, 8 bits each, line by line, frame by frame.
    Pixels(PixelInput),
}

/// Sound as a model takes it: see [`pb::ClipInput`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClipInput {
    /// Samples per second.
    pub rate: u32,
    /// Samples per frame.
    pub hop: u32,
    /// Frames per chunk.
    pub chunk: u32,
    /// Number of times that a chunk's frames are halved, rounded up, to its tokens.
    pub halvings: u32,
    /// Fewest samples of a request's longest clip.
    pub shortest: u32,
}

/// Images or videos as a model takes them: see [`pb::PixelInput`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PixelInput {
    /// Pixels per side of a patch.
    pub patch: u32,
    /// Patches per side of a token.
    pub merge: u32,
    /// Frames per patch.
    pub temporal: u32,
    /// Smallest number of pixels after resizing.
    pub shortest_edge: u64,
    /// Largest number of pixels after resizing.
    pub longest_edge: u64,
    /// Pixels that the two limits count.
    pub counted: PixelCount,
    /// Positions per second of a video; 0 if time does not move positions.
    pub positions_per_second: f32,
    /// Text between the frames of a video; `None` if a video is one run of tokens.
    pub timestamps: Option<Timestamps>,
    /// Sentinels around a video and its sound; `None` if videos have no sound.
    pub sound: Option<SoundSentinels>,
}

/// Pixels that the limits of a [`PixelInput`] count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PixelCount {
    /// The pixels of one frame.
    PerFrame,
    /// The pixels of all frames, whose number is rounded to whole patches, a half to the even number.
    AllFrames,
}

/// Sentinels around each patch of frames of a video: see [`pb::Timestamps`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timestamps {
    /// Token behind the text of the time.
    pub begin: u32,
    /// Token behind the patch.
    pub end: u32,
}

/// Sentinels around the tokens of a video and of its sound, which take turns: see [`pb::SoundSentinels`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoundSentinels {
    /// Token in front of both.
    pub begin: u32,
    /// Token behind both.
    pub end: u32,
}

impl MediaInput {
    /// Returns the reason why the input cannot be declared, as a predicate.
    pub(super) fn problem(&self) -> Option<&'static str> {
        let sizes = match self.form {
            MediaForm::Bytes { per_token } => vec![per_token],
            MediaForm::Clips(ClipInput { rate, hop, chunk, .. }) => vec![rate, hop, chunk],
            MediaForm::Pixels(PixelInput { patch, merge, temporal, .. }) => vec![patch, merge, temporal],
        };
        let is_video = self.kind == pb::MediaKind::Video;
        let is_sound = self.kind == pb::MediaKind::Audio;
        if sizes.contains(&0) || self.width == 0 {
            return Some("has a form with a size of 0, or rows of no width");
        }
        if self.max_call_tokens == Some(0) {
            return Some("has an encoder that takes no tokens");
        }
        match self.form {
            MediaForm::Bytes { .. } if self.formats.is_empty() => Some("is taken as bytes of no format"),
            MediaForm::Bytes { .. } => None,
            _ if !self.formats.is_empty() => Some("has one form, but names formats"),
            MediaForm::Clips(_) if !is_sound => Some("is taken as clips, but is no sound"),
            MediaForm::Clips(_) if !self.encoded_together => {
                Some("is padded to the longest, but encoded one by one")
            }
            MediaForm::Clips(ClipInput { halvings, .. }) if halvings > 32 => Some("has too many halvings"),
            MediaForm::Clips(_) => None,
            MediaForm::Pixels(_) if is_sound => Some("is taken as pixels, but is sound"),
            MediaForm::Pixels(pixels) => pixels.problem(is_video),
        }
    }
}

impl PixelInput {
    fn problem(&self, is_video: bool) -> Option<&'static str> {
        if self.shortest_edge > self.longest_edge || self.longest_edge == 0 {
            return Some("has limits of pixels that no size fits");
        }
        // Sizes beyond this are those of no model, and their products would not fit.
        if [self.patch, self.merge, self.temporal].iter().any(|&size| size > 1 << 10) {
            return Some("has patches of more than 1,024 pixels, frames or tokens");
        }
        if !(self.positions_per_second >= 0.0 && self.positions_per_second <= 1000.0) {
            return Some("has positions per second that are not from 0 to 1,000");
        }
        if self.timestamps.is_some() && self.sound.is_some() {
            return Some("has timestamps and sound, which no rule of positions covers");
        }
        if !is_video && self.sound.is_some() {
            return Some("has sound, but is no video");
        }
        (!is_video && self.timestamps.is_some()).then_some("has timestamps, but is no video")
    }
}

/// One call of an encoder for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncoderCall {
    /// The walk that the call runs.
    pub walk: WalkId,
    /// Indices of the call's items, ascending.
    pub items: Vec<usize>,
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
    /// Index of the item at fault, or of the first one of a call.
    pub fn item(&self) -> usize {
        match self {
            Self::NoInput { item } => *item,
            Self::TooLarge { call, .. } => call.items.first().copied().unwrap_or_default(),
        }
    }

    /// The request's field at fault: one item, or all items if a call encodes several.
    pub fn field(&self) -> String {
        match self {
            Self::NoInput { item } => format!("media[{item}]"),
            Self::TooLarge { call: EncoderCall { items, .. }, .. } => match items[..] {
                [item] => format!("media[{item}]"),
                _ => "media".into(),
            },
        }
    }
}

impl ModelDeclaration {
    /// Divides a request's items into calls of encoders, in the order of each call's first item: one call per item, or
    /// one call for all items of an input that is [encoded together](MediaInput::encoded_together). The items' runs say
    /// how many tokens they have.
    pub fn encoder_calls(&self, items: &[pb::MediaItem]) -> Result<Vec<EncoderCall>, EncoderCallError> {
        encoder_calls(&self.media, items.iter().map(|item| (item.kind(), item.tokens())))
    }
}

/// [`ModelDeclaration::encoder_calls`] of items of which only kinds and numbers of tokens are known.
pub fn encoder_calls(
    inputs: &[MediaInput],
    items: impl Iterator<Item = (pb::MediaKind, usize)>,
) -> Result<Vec<EncoderCall>, EncoderCallError> {
    let mut calls: Vec<EncoderCall> = Vec::new();
    for (index, (kind, tokens)) in items.enumerate() {
        let input = inputs.iter().find(|input| input.kind == kind);
        let input = input.ok_or(EncoderCallError::NoInput { item: index })?;
        let walk = input.walk;
        match calls.iter_mut().find(|call| input.encoded_together && call.walk == walk) {
            Some(call) => {
                call.items.push(index);
                call.tokens = call.tokens.saturating_add(tokens);
            }
            None => calls.push(EncoderCall { walk, items: vec![index], tokens }),
        }
    }
    for call in &calls {
        let input = inputs.iter().find(|input| input.walk == call.walk);
        if let Some(limit) = input.and_then(|input| input.max_call_tokens)
            && call.tokens > limit as usize
        {
            return Err(EncoderCallError::TooLarge { call: call.clone(), limit });
        }
    }
    Ok(calls)
}

impl ModelDeclaration {
    /// Elements per unit of embeddings in transfers: the greatest common divisor of the widths of all rows, which is
    /// the width of an embedding without features. 0 if the model takes only text.
    pub fn embedding_unit(&self) -> usize {
        let divisor = |a: usize, b: usize| {
            let (mut a, mut b) = (a, b);
            while b > 0 {
                (a, b) = (b, a % b);
            }
            a
        };
        self.media.iter().map(|input| input.width as usize).fold(0, divisor)
    }

    /// Number of units of an item's embeddings.
    pub fn units_of(&self, item: &pb::MediaItem) -> usize {
        let width = self.media_input(item.kind()).map_or(0, |input| input.width as usize);
        item.tokens().saturating_mul(width.checked_div(self.embedding_unit()).unwrap_or(0))
    }
}

impl pb::MediaItem {
    /// Number of tokens in the item's runs.
    pub fn tokens(&self) -> usize {
        self.runs.iter().map(|run| run.tokens as usize).fold(0, usize::saturating_add)
    }
}

impl From<&MediaInput> for pb::MediaInput {
    fn from(input: &MediaInput) -> Self {
        Self {
            kind: input.kind.into(),
            walk: input.walk.0,
            placeholder_token_id: input.placeholder,
            form: Some(match input.form {
                MediaForm::Bytes { per_token } => pb::media_input::Form::BytesPerToken(per_token),
                MediaForm::Clips(ClipInput { rate, hop, chunk, halvings, shortest }) => {
                    pb::media_input::Form::Clips(pb::ClipInput { rate, hop, chunk, halvings, shortest })
                }
                MediaForm::Pixels(pixels) => pb::media_input::Form::Pixels(pixels.into()),
            }),
            width: input.width,
            formats: input.formats.clone(),
            encoded_together: input.encoded_together,
            max_call_tokens: input.max_call_tokens,
        }
    }
}

impl From<PixelInput> for pb::PixelInput {
    fn from(pixels: PixelInput) -> Self {
        let counted = match pixels.counted {
            PixelCount::PerFrame => pb::PixelCount::PerFrame,
            PixelCount::AllFrames => pb::PixelCount::AllFrames,
        };
        let timestamps =
            |Timestamps { begin, end }| pb::Timestamps { begin_token_id: begin, end_token_id: end };
        let sound =
            |SoundSentinels { begin, end }| pb::SoundSentinels { begin_token_id: begin, end_token_id: end };
        Self {
            patch: pixels.patch,
            merge: pixels.merge,
            temporal: pixels.temporal,
            shortest_edge: pixels.shortest_edge,
            longest_edge: pixels.longest_edge,
            counted: counted.into(),
            positions_per_second: pixels.positions_per_second,
            timestamps: pixels.timestamps.map(timestamps),
            sound: pixels.sound.map(sound),
        }
    }
}

impl From<pb::PixelInput> for PixelInput {
    fn from(message: pb::PixelInput) -> Self {
        let counted = match message.counted() {
            pb::PixelCount::AllFrames => PixelCount::AllFrames,
            pb::PixelCount::PerFrame | pb::PixelCount::Unspecified => PixelCount::PerFrame,
        };
        let timestamps =
            |message: pb::Timestamps| Timestamps { begin: message.begin_token_id, end: message.end_token_id };
        let sound = |message: pb::SoundSentinels| SoundSentinels {
            begin: message.begin_token_id,
            end: message.end_token_id,
        };
        Self {
            patch: message.patch,
            merge: message.merge,
            temporal: message.temporal,
            shortest_edge: message.shortest_edge,
            longest_edge: message.longest_edge,
            counted,
            positions_per_second: message.positions_per_second,
            timestamps: message.timestamps.map(timestamps),
            sound: message.sound.map(sound),
        }
    }
}

impl From<pb::MediaInput> for MediaInput {
    fn from(message: pb::MediaInput) -> Self {
        Self {
            kind: message.kind(),
            walk: WalkId(message.walk),
            placeholder: message.placeholder_token_id,
            form: match message.form {
                Some(pb::media_input::Form::Clips(clips)) => {
                    let pb::ClipInput { rate, hop, chunk, halvings, shortest } = clips;
                    MediaForm::Clips(ClipInput { rate, hop, chunk, halvings, shortest })
                }
                Some(pb::media_input::Form::Pixels(pixels)) => MediaForm::Pixels(pixels.into()),
                Some(pb::media_input::Form::BytesPerToken(per_token)) => MediaForm::Bytes { per_token },
                // The declaration's check refuses a form of no size.
                None => MediaForm::Bytes { per_token: 0 },
            },
            width: message.width,
            formats: message.formats,
            encoded_together: message.encoded_together,
            max_call_tokens: message.max_call_tokens,
        }
    }
}
