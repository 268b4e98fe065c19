//! Simulated audio: an encoder without weights. The embedding of each token of an item is a digest of the item and the
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
}

/// Returns the conversion of audio to tokens that the config declares, or `None` if the model takes no audio.
pub fn of(file: &ConfigFile) -> Result<Option<Audio>, LoadError> {
    let Keys { audio_token_id: Some(placeholder), audio_bytes_per_token } = file.parse()? else {
        return Ok(None);
    };
    match audio_bytes_per_token {
        Some(bytes_per_token) if bytes_per_token > 0 => {
            Ok(Some(Audio { placeholder, bytes_per_token, width: WIDTH }))
        }
        _ => Err(file.invalid("audio_bytes_per_token: must be at least 1")),
    }
}

/// Appends the embeddings of the tokens of `data`, one item, to `out`. Each embedding depends on the whole item.
pub fn encode(data: &[u8], audio: Audio, out: &mut Vec<f32>) {
    let item = data.iter().fold(digest::EMPTY, |digest, byte| digest::extend(digest, u32::from(*byte)));
    for token in 0..data.len().div_ceil(audio.bytes_per_token) {
        let meaning = digest::extend(item, token as u32);
        out.extend((0..WIDTH).map(|lane| f32::from((meaning >> (16 * lane)) as u16)));
    }
}

/// Returns the digest that an embedding holds.
pub fn meaning(embedding: &[f32]) -> u64 {
    embedding.iter().rev().fold(0, |meaning, lane| meaning << 16 | u64::from(*lane as u16))
}
