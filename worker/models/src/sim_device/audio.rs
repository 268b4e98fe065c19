//! Audio without an encoder's weights: what a simulated encoder gives is a digest of the item for each of its tokens, as four
//! numbers that a float holds exactly. The thinker goes by it as it goes by a token's id.

use serde::Deserialize;

use super::digest;
use crate::{LoadError, config::ConfigFile, thinker::Audio};

/// Elements of an embedding.
const WIDTH: usize = 4;

/// The keys of a model that takes audio.
#[derive(Deserialize)]
struct Keys {
    audio_token_id: Option<u32>,
    audio_bytes_per_token: Option<usize>,
}

/// How the checkpoint's model takes audio, if it does.
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

/// Appends what stands for each of an item's tokens: every one of them depends on all of the item.
pub fn encode(data: &[u8], audio: Audio, out: &mut Vec<f32>) {
    let item = data.iter().fold(digest::EMPTY, |digest, byte| digest::extend(digest, u32::from(*byte)));
    for token in 0..data.len().div_ceil(audio.bytes_per_token) {
        let meaning = digest::extend(item, token as u32);
        out.extend((0..WIDTH).map(|part| f32::from((meaning >> (16 * part)) as u16)));
    }
}

/// The same, read by the thinker.
pub fn meaning(embedding: &[f32]) -> u64 {
    embedding.iter().rev().fold(0, |meaning, part| meaning << 16 | u64::from(*part as u16))
}
