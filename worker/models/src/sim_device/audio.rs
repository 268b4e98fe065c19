//! Simulated audio: an encoder without weights. The embedding of each token is a digest of the encoded items and the
//! token's index, split into four numbers that an f32 holds exactly. The simulated thinker mixes this digest into the
//! digest of its sequence.

use serde::Deserialize;

use super::digest;
use crate::{LoadError, config::ConfigFile, thinker::Audio};

/// Elements per embedding.
const WIDTH: usize = 4;

/// The keys that a model's config has if the model takes audio.
#[derive(Deserialize)]
struct Keys {
    audio_token_id: Option<u32>,
    audio_bytes_per_token: Option<usize>,
    #[serde(default)]
    audio_encoded_together: bool,
    audio_max_call_tokens: Option<u32>,
}

/// Returns the conversion of audio to tokens that the config declares, or `None` if the model takes no audio.
pub fn of(file: &ConfigFile) -> Result<Option<Audio>, LoadError> {
    let keys: Keys = file.parse()?;
    let Some(placeholder) = keys.audio_token_id else { return Ok(None) };
    match keys.audio_bytes_per_token {
        Some(bytes_per_token) if bytes_per_token > 0 => Ok(Some(Audio {
            placeholder,
            bytes_per_token,
            width: WIDTH,
            encoded_together: keys.audio_encoded_together,
            max_call_tokens: keys.audio_max_call_tokens,
        })),
        _ => Err(file.invalid("audio_bytes_per_token: must be at least 1")),
    }
}

/// Appends the embeddings of the tokens of a call's items to `out`. Each embedding depends on all items.
pub fn encode(items: &[&[u8]], audio: Audio, out: &mut Vec<f32>) {
    let bytes = items.iter().copied().flatten();
    let call = bytes.fold(digest::EMPTY, |digest, byte| digest::extend(digest, u32::from(*byte)));
    let tokens: usize = items.iter().map(|data| data.len().div_ceil(audio.bytes_per_token)).sum();
    for token in 0..tokens {
        let meaning = digest::extend(call, token as u32);
        out.extend((0..WIDTH).map(|lane| f32::from((meaning >> (16 * lane)) as u16)));
    }
}

/// Returns the digest that an embedding holds.
pub fn meaning(embedding: &[f32]) -> u64 {
    embedding.iter().rev().fold(0, |meaning, lane| meaning << 16 | u64::from(*lane as u16))
}
