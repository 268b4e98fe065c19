//! A test model: a Qwen3 with a small, untrained audio encoder. It tests encoder nodes (declaration, placement,
//! running, transfer) until a real family has an encoder. The test model's weights are random (`--load-format dummy`)
//! or made by a test. The cargo feature `media-test-model` adds the family to a build.
//!
//! The thinker is a dense Qwen3 of [`llama`](crate::llama), unchanged. The encoder takes 16-bit samples in frames of
//! `audio_bytes_per_token` bytes, one frame per token. It divides the samples by the loudest sample of a call's items
//! and by the number of these items, so neither an item nor the items of a call can be divided. It then maps each frame
//! to an embedding by a linear map and a norm.
//!
//! `config.json` is that of a Qwen3 with two more keys, `audio_token_id` and `audio_bytes_per_token`. Two others are
//! optional: `audio_encoded_together`, by which one call encodes all items of a request, and `audio_max_call_tokens`,
//! the maximum number of tokens per call.

mod encoder;
mod encoder_only;
mod with_thinker;

use std::path::Path;

use serde::Deserialize;
use tutti_proto::declaration::ModelDeclaration;

use self::{encoder::Encoder, encoder_only::EncoderOnly, with_thinker::WithThinker};
use crate::{
    DecoderDevice, LoadError, LoadOptions, Model,
    config::ConfigFile,
    llama::{self, QWEN3, Shape},
    thinker::{self, Audio, HeldNodes},
    weights::Progress,
};

/// The name of this family in a config's `architectures`.
pub(crate) const ARCHITECTURE: &str = "TuttiMediaTestForCausalLM";
/// The name of this family in a config's `model_type`, which is used only if `architectures` is missing.
pub(crate) const MODEL_TYPE: &str = "tutti_media_test";

/// The keys of this family that a Qwen3 config does not have.
#[derive(Deserialize)]
struct Keys {
    audio_token_id: u32,
    audio_bytes_per_token: usize,
    #[serde(default)]
    audio_encoded_together: bool,
    audio_max_call_tokens: Option<u32>,
}

/// Loads those nodes of the model that `options.nodes` names.
pub(crate) fn load<D: DecoderDevice>(
    file: &ConfigFile,
    dir: &Path,
    options: &LoadOptions,
    mut device: D,
    progress: Progress<'_>,
) -> Result<Box<dyn Model>, LoadError> {
    let shape = Shape::parse(file, &QWEN3)?;
    let keys: Keys = file.parse()?;
    if keys.audio_bytes_per_token == 0 || !keys.audio_bytes_per_token.is_multiple_of(2) {
        let bytes = keys.audio_bytes_per_token;
        return Err(file.invalid(format!("audio_bytes_per_token: {bytes} bytes are not one or more samples")));
    }
    if keys.audio_token_id as usize >= shape.vocab_size {
        let (id, vocab) = (keys.audio_token_id, shape.vocab_size);
        return Err(file.invalid(format!("audio_token_id: {id} is not below vocab_size, {vocab}")));
    }
    let audio = Audio {
        placeholder: keys.audio_token_id,
        bytes_per_token: keys.audio_bytes_per_token,
        width: shape.hidden_size,
        encoded_together: keys.audio_encoded_together,
        max_call_tokens: keys.audio_max_call_tokens,
    };
    let declare = |text: &ModelDeclaration| thinker::with_audio(text, audio);
    let held = HeldNodes::of(options.nodes.as_deref());
    let encoder =
        held.encoder.then(|| Encoder::load(audio, &shape, dir, options, &mut device)).transpose()?;
    match encoder {
        Some(encoder) if !held.thinker => {
            // The plane is the thinker's. This worker allocates none of it.
            let bytes_per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype.bytes();
            let declaration = declare(&thinker::declaration(options.page_tokens, bytes_per_token)?)?;
            let limits = shape.limits(dir, options.max_step_tokens)?;
            Ok(Box::new(EncoderOnly { device, encoder, declaration, limits }))
        }
        encoder => {
            let thinker = llama::load(&QWEN3, file, dir, options, device, progress)?;
            let declaration = declare(thinker.declaration())?;
            Ok(Box::new(WithThinker { thinker, encoder, declaration }))
        }
    }
}
