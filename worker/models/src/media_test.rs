//! A test model: a Qwen3 with a small, untrained audio encoder. It tests the declaration, the placement, the running
//! and the transfers of encoder nodes until a real family has an encoder. The test model's weights are random
//! (`--load-format dummy`) or written by a test. The cargo feature `media-test-model` adds the family to a build.
//!
//! The thinker is a dense Qwen3 of [`llama`](crate::llama), unchanged. The encoder takes 16-bit samples in frames of
//! `audio_bytes_per_token` bytes, one frame per token. It divides the samples by the loudest sample of all items of a
//! call and by the number of these items. So the result shows if an item was split, or if the items were divided among
//! calls in a wrong way. A linear map and a norm then turn each frame into an embedding.
//!
//! `config.json` is that of a Qwen3 with two more keys, `audio_token_id` and `audio_bytes_per_token`, and two optional
//! keys. If `audio_encoded_together` is true, one call encodes all items of a request. `audio_max_call_tokens` is the
//! maximum number of tokens per call.

mod encoder;

use self::encoder::Encoder;
use crate::{
    DecoderDevice, LoadError, LoadOptions,
    config::{ConfigFile, ranges, text::TextConfig},
    llama::{self, QWEN3},
    thinker::{Audio, DeclaredEncoder},
    with_encoders::{EncoderSet, MediaEncoder},
};

/// Reads and checks the config: the text model's keys, and the keys of the audio encoder.
pub(crate) fn parse(file: &ConfigFile) -> Result<(llama::Config, Audio), LoadError> {
    let (keys, config) = (file.keys(), llama::Config::parse(file, &QWEN3)?);
    let audio = Audio::read(&keys, config.text.hidden_size)?;
    let audio = audio.ok_or_else(|| keys.missing(&ranges::AUDIO_TOKEN_ID))?;
    let bytes = audio.bytes_per_token;
    if bytes == 0 || !bytes.is_multiple_of(2) {
        let problem = format!("{bytes} bytes are not one or more samples");
        return Err(keys.invalid(&ranges::AUDIO_BYTES_PER_TOKEN, problem));
    }
    let (id, vocab) = (audio.placeholder, config.text.vocab_size);
    if id as usize >= vocab {
        let problem = format!("{id} is not below vocab_size, {vocab}");
        return Err(keys.invalid(&ranges::AUDIO_TOKEN_ID, problem));
    }
    Ok((config, audio))
}

/// The encoder of the test model.
pub(crate) struct TestEncoder {
    pub audio: Audio,
    pub thinker: TextConfig,
}

impl EncoderSet for TestEncoder {
    fn declared(&self) -> Vec<DeclaredEncoder> {
        vec![self.audio.into()]
    }

    fn load<D: DecoderDevice>(
        &self,
        _: &'static str,
        options: &LoadOptions,
        device: &mut D,
    ) -> Result<Box<dyn MediaEncoder<D>>, LoadError> {
        Ok(Box::new(Encoder::load(self.audio, &self.thinker, options, device)?))
    }
}
