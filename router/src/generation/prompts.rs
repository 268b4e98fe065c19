//! Encodes a client's prompts into token ids: chat template, tokenizer, and the checks that need the vocabulary.

use std::sync::Arc;

use tutti_formats::Block;
use tutti_proto::{TokenLimit, cluster::v1::MediaItem, parameters::check_token_ids};
use tutti_runtime::Error;
use tutti_settings::ChatSpecialTokens;

use super::{conversation, decode::DecodedItem, media, request::Prompt};
use crate::{
    served::ServedModel,
    text::{
        detokenizer::Detokenizer,
        quoting::QuotedText,
        tokenizer::{SpecialTokens, Tokenizer, max_text_bytes},
    },
};

/// A prompt as token ids, with the text that an echo repeats.
#[derive(Clone, Debug, PartialEq)]
pub struct EncodedPrompt {
    /// Token ids; at least one.
    pub ids: Arc<[u32]>,
    /// Media items, with their positions among the tokens.
    pub media: Vec<MediaItem>,
    /// The text to echo. Empty if no echo is requested, or with `skip_tokenizer_init`.
    pub text: Arc<str>,
    /// Number of characters in `text`.
    pub chars: usize,
    /// For each token, the number of characters of `text` before it. Empty if no echo is requested.
    pub offsets: Arc<[usize]>,
    /// The state of the block of reasoning behind a chat; `None` for other prompts.
    pub block: Option<Block>,
}

/// Options of an echo: the repetition of the prompt before the output.
#[derive(Clone, Copy, Debug)]
pub struct Echo {
    /// True to show special tokens in the echoed text of a prompt that was given as token ids.
    pub keep_special_tokens: bool,
}

/// Encodes all prompts of a request. Media belong to a single prompt. CPU-bound: run it in the text pool.
pub fn encode(
    prompts: Vec<Prompt>,
    mut media: Vec<DecodedItem>,
    model: &ServedModel,
    echo: Option<Echo>,
    special_tokens: ChatSpecialTokens,
) -> Result<Vec<EncodedPrompt>, Error> {
    let count = prompts.len();
    let numbered = prompts.into_iter().enumerate();
    numbered
        .map(|(i, prompt)| {
            let media = std::mem::take(&mut media);
            encode_one(prompt, media, model, echo, special_tokens)
                .map_err(|error| if count == 1 { error } else { locate(error, i) })
        })
        .collect()
}

/// Adds the prompt's index in the request's list of prompts to an error.
fn locate(error: Error, index: usize) -> Error {
    let message = format!("prompt {index} of the list: {}", error.message());
    let located = Error::new(error.kind(), message);
    match error.field() {
        Some(field) => located.with_field(field),
        None => located,
    }
}

fn encode_one(
    prompt: Prompt,
    media: Vec<DecodedItem>,
    model: &ServedModel,
    echo: Option<Echo>,
    special_tokens: ChatSpecialTokens,
) -> Result<EncodedPrompt, Error> {
    let (is_chat, continued) = match &prompt {
        Prompt::Chat { conversation, .. } => (true, conversation.continued()),
        _ => (false, None),
    };
    let (ids, given) = to_tokens(prompt, &media, model, Length::OfPrompt, special_tokens)?;
    let block = is_chat.then(|| block(model, continued.as_deref(), given.as_deref()));
    let (ids, media) = media::expand(ids, media, model)?;
    if ids.is_empty() {
        return Err(Error::invalid("prompt", "is empty: it has no tokens"));
    }
    let (text, offsets) = match (echo, &model.text.tokenizer) {
        (Some(echo), Some(tokenizer)) => {
            let (shown, offsets) = show(&ids, tokenizer, echo);
            (given.unwrap_or(shown), offsets)
        }
        (Some(_), None) => (String::new(), vec![0; ids.len()]),
        (None, _) => (String::new(), Vec::new()),
    };
    let chars = text.chars().count();
    Ok(EncodedPrompt { ids: ids.into(), media, text: text.into(), chars, offsets: offsets.into(), block })
}

/// The state of the block of reasoning behind a prompt, whose output may continue a message.
fn block(model: &ServedModel, continued: Option<&str>, prompt: Option<&str>) -> Block {
    let (Some(reasoning), Some(prompt)) = (model.text.dialect.reasoning(), prompt) else {
        return Block::Unopened;
    };
    match continued.map(|message| reasoning.block_within(message)) {
        Some(state) if state != Block::Unopened => state,
        _ => reasoning.block_after(prompt),
    }
}

/// The number of tokens that a text may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// At most the number of tokens that one request may have. A longer text is refused, if possible before it is
    /// encoded.
    OfPrompt,
    /// Any number. Only the text's size in bytes is limited.
    Any,
}

/// Encodes a prompt, whose text gets the times of the frames of `media`. `chat_special_tokens` says what special tokens
/// in the text of a conversation are. Returns the prompt's token ids, and its text unless the prompt was given as token
/// ids. CPU-bound: run it in the text pool.
pub fn to_tokens(
    prompt: Prompt,
    media: &[DecodedItem],
    model: &ServedModel,
    length: Length,
    chat_special_tokens: ChatSpecialTokens,
) -> Result<(Vec<u32>, Option<String>), Error> {
    let TokenLimit { tokens: limit, what } = model.description.request_limits().tokens;
    let (bytes, max_bytes) = (prompt.text_bytes(), max_text_bytes(limit));
    let field = if matches!(prompt, Prompt::Chat { .. }) { "messages" } else { "prompt" };
    if bytes > max_bytes {
        let message =
            format!("has {bytes} bytes of text, but may have at most {max_bytes} for {limit} tokens, {what}");
        return Err(Error::invalid(field, message));
    }
    let (mut text, add_special_tokens, tokenizer): (QuotedText, _, _) = match prompt {
        Prompt::Tokens(ids) => {
            check_token_ids("prompt", ids.iter().copied(), model.description.vocab_size)?;
            return Ok((ids, None));
        }
        Prompt::Text { text, add_special_tokens } => {
            (text.into(), add_special_tokens, model.tokenizer("prompt", "text")?)
        }
        Prompt::Chat { conversation, add_special_tokens } => {
            let tokenizer = model.tokenizer("messages", "chat")?;
            let text = conversation::render(conversation, model, chat_special_tokens, max_bytes)?;
            (text, add_special_tokens, tokenizer)
        }
    };
    text.text = media::write_times(text.text, media, model);
    let most = if length == Length::OfPrompt { limit } else { u32::MAX };
    let bytes = text.unquoted_bytes();
    if tokenizer.surely_exceeds(bytes, most) {
        let message = format!("has {bytes} bytes, more than {limit} tokens can stand for, which is {what}");
        return Err(Error::invalid("prompt", message));
    }
    let special_tokens = SpecialTokens::included(add_special_tokens);
    match tokenizer.encode_up_to(&text, special_tokens, most as usize)? {
        Some(ids) => Ok((ids, Some(text.into_unquoted()))),
        None => Err(Error::invalid("prompt", format!("has more than {limit} tokens, {what}"))),
    }
}

/// Decodes a prompt. Returns the text, and the number of characters of the text before each token.
fn show(ids: &[u32], tokenizer: &Arc<Tokenizer>, echo: Echo) -> (String, Vec<usize>) {
    let mut detokenizer =
        Detokenizer::new(tokenizer.clone(), SpecialTokens::included(echo.keep_special_tokens));
    let (mut text, mut chars) = (String::new(), 0);
    let offsets = ids
        .iter()
        .map(|&id| {
            let piece = detokenizer.push(id);
            let before = chars + piece.earlier;
            chars += piece.text.chars().count();
            text.push_str(&piece.text);
            before
        })
        .collect();
    // An incomplete character at the end is left to the output, which may complete it.
    (text, offsets)
}
