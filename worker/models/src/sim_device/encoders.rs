//! Simulated encoders of sound and of pictures, without weights. The embedding of each token is a digest of the encoded
//! items and the token's index, split into four 16-bit numbers. The simulated thinker mixes this digest into the digest
//! of its sequence.

use std::path::Path;

use tutti_kernels::{DeviceError, WeightType};
use tutti_proto::{
    cluster::v1::MediaKind,
    declaration::{MediaForm, MediaInput, PixelCount, PixelInput, WalkId},
};

use super::digest;
use crate::{
    EncoderItem, LoadError,
    config::{
        keys::Keys,
        ranges::{AUDIO_BYTES_PER_TOKEN, IMAGE_TOKEN_ID, OUT_HIDDEN_SIZE, VISION_CONFIG},
    },
    preprocessing::PreprocessorFiles,
    thinker::{Audio, DeclaredEncoder, VISION_ENCODER},
    vision::VisionConfig,
};

/// Elements per embedding.
pub const WIDTH: usize = 4;

/// The encoders of a simulated model.
#[derive(Clone, Copy)]
pub struct Encoders {
    audio: Option<Audio>,
    pictures: Option<Pictures>,
}

/// The conversion of pictures to tokens.
#[derive(Clone, Copy)]
struct Pictures {
    placeholder: u32,
    pixels: PixelInput,
}

impl Encoders {
    /// Reads the encoders of a config. Sound has the keys of the test model. Pictures have those of real models:
    /// `image_token_id`, a `vision_config`, and a preprocessor's file in `dir`.
    pub fn read(keys: &Keys<'_>, dir: &Path) -> Result<Self, LoadError> {
        let audio = Audio::read(keys, WIDTH)?;
        if audio.is_some_and(|audio| audio.bytes_per_token == 0) {
            return Err(keys.invalid(&AUDIO_BYTES_PER_TOKEN, "must be at least 1, not 0"));
        }
        let vision = keys.section(VISION_CONFIG)?;
        if vision.is_missing() {
            return Ok(Self { audio, pictures: None });
        }
        let Some(files) = PreprocessorFiles::read(dir)? else { return Ok(Self { audio, pictures: None }) };
        let width = vision.need(&OUT_HIDDEN_SIZE)?;
        let config = VisionConfig::read(&vision, false, width, WeightType::F32)?;
        let limits = files.images(dir, &config)?.limits;
        let pixels = PixelInput {
            patch: config.patch as u32,
            merge: config.merge as u32,
            temporal: config.temporal as u32,
            shortest_edge: limits.shortest_edge,
            longest_edge: limits.longest_edge,
            counted: PixelCount::PerFrame,
            positions_per_second: 0.0,
            timestamps: None,
            sound: None,
        };
        Ok(Self { audio, pictures: Some(Pictures { placeholder: keys.need(&IMAGE_TOKEN_ID)?, pixels }) })
    }

    /// Returns the encoders as they are declared.
    pub fn declared(&self) -> Vec<DeclaredEncoder> {
        let of_pictures = |Pictures { placeholder, pixels }| {
            let input = MediaInput {
                kind: MediaKind::Image,
                walk: WalkId(0),
                placeholder,
                form: MediaForm::Pixels(pixels),
                width: WIDTH as u32,
                formats: Vec::new(),
                encoded_together: false,
                max_call_tokens: None,
            };
            DeclaredEncoder { node: VISION_ENCODER, inputs: vec![input] }
        };
        let audio = self.audio.map(DeclaredEncoder::from);
        audio.into_iter().chain(self.pictures.map(of_pictures)).collect()
    }

    /// Returns the number of tokens of a call's items.
    pub fn tokens(&self, items: &[EncoderItem<'_>]) -> Result<usize, DeviceError> {
        let of_item = |item: &EncoderItem<'_>| match (item.grid, self.pictures, self.audio) {
            (Some(grid), Some(Pictures { pixels, .. }), _) => {
                pixels.tokens(&grid).map(|tokens| tokens as usize).map_err(DeviceError::Misuse)
            }
            (None, _, Some(audio)) => Ok(item.data.len().div_ceil(audio.bytes_per_token)),
            _ => Err(DeviceError::Misuse("an item that no simulated encoder takes".into())),
        };
        items.iter().map(of_item).sum()
    }
}

/// Appends the embeddings of the `tokens` tokens of a call's items to `out`. Each embedding depends on all items of the
/// call.
pub fn encode(items: &[EncoderItem<'_>], tokens: usize, out: &mut Vec<f32>) {
    let bytes = items.iter().flat_map(|item| item.data);
    let call = bytes.fold(digest::EMPTY, |digest, byte| digest::extend(digest, u32::from(*byte)));
    for token in 0..tokens {
        let meaning = digest::extend(call, token as u32);
        out.extend((0..WIDTH).map(|lane| f32::from((meaning >> (16 * lane)) as u16)));
    }
}

/// Returns the digest that an embedding holds.
pub fn meaning(embedding: &[f32]) -> u64 {
    embedding.iter().rev().fold(0, |meaning, lane| meaning << 16 | u64::from(*lane as u16))
}
