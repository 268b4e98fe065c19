//! Simulated audio: an encoder without weights. The embedding of each token is a digest of the encoded items and the
//! token's index, split into four 16-bit numbers. The simulated thinker mixes this digest into the digest of its
//! sequence.

use super::digest;
use crate::{
    EncoderItem, LoadError,
    config::{keys::Keys, ranges::AUDIO_BYTES_PER_TOKEN},
    thinker::Audio,
};

/// Elements per embedding.
const WIDTH: usize = 4;

/// Returns the conversion of audio to tokens that the config declares, or `None` if the model takes no audio.
pub fn read(keys: &Keys<'_>) -> Result<Option<Audio>, LoadError> {
    match Audio::read(keys, WIDTH)? {
        Some(Audio { bytes_per_token: 0, .. }) => {
            Err(keys.invalid(&AUDIO_BYTES_PER_TOKEN, "must be at least 1, not 0"))
        }
        audio => Ok(audio),
    }
}

/// Appends the embeddings of the tokens of a call's items to `out`. Each embedding depends on all items of the call.
pub fn encode(items: &[EncoderItem<'_>], audio: Audio, out: &mut Vec<f32>) {
    let bytes = items.iter().flat_map(|item| item.data);
    let call = bytes.fold(digest::EMPTY, |digest, byte| digest::extend(digest, u32::from(*byte)));
    let tokens: usize = items.iter().map(|item| item.data.len().div_ceil(audio.bytes_per_token)).sum();
    for token in 0..tokens {
        let meaning = digest::extend(call, token as u32);
        out.extend((0..WIDTH).map(|lane| f32::from((meaning >> (16 * lane)) as u16)));
    }
}

/// Returns the digest that an embedding holds.
pub fn meaning(embedding: &[f32]) -> u64 {
    embedding.iter().rev().fold(0, |meaning, lane| meaning << 16 | u64::from(*lane as u16))
}
