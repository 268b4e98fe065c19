//! Simulated audio: an encoder without weights. The embedding of each token of an item is a digest of the item and the
//! token's index, as four numbers that an f32 holds exactly. The thinker mixes it into its own digest.

use serde::Deserialize;

use super::digest;
use crate::{LoadError, config::ConfigFile, thinker::Audio};

/// Elements per embedding.
const WIDTH: usize = 4;

/// The keys of a model that takes audio.
#[derive(Deserialize)]
struct Keys {
    audio_token_id: Option<u32>,
    audio_bytes_per_token: Option<usize>,
}

/// Reads how the checkpoint's model takes audio; `None` if it takes none.
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

/// Appends the embeddings of an item's tokens. Each depends on the whole item.
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
