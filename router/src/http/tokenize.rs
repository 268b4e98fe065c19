//! `/tokenize` and `/detokenize`, in vLLM's format.

use axum::{
    Json,
    extract::{Request, State},
};
use serde::Serialize;
use tutti_proto::parameters::{Scope, check_token_ids};
use tutti_runtime::Error;

use super::{Api, error::ApiError, fields::Fields, messages};
use crate::{
    generation::{Length, Prompt, to_tokens},
    keys::Entry,
    served::ServedModel,
    text::{
        pool::{Lane, TextWork},
        tokenizer::SpecialTokens,
    },
};

#[derive(Serialize)]
pub struct Tokenized {
    count: usize,
    max_model_len: u32,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

#[derive(Serialize)]
pub struct Detokenized {
    prompt: String,
}

pub(super) struct TokenizeRequest {
    model: Option<String>,
    pub(super) prompt: Prompt,
    return_token_strs: bool,
}

pub(super) fn parse_tokenize(body: &[u8]) -> Result<TokenizeRequest, Error> {
    let mut fields = Fields::of_body(body, Scope::Tokenize)?;
    let model = fields.take("model")?;
    let return_token_strs = fields.take_or_default("return_token_strs")?;
    let prompt = match fields.take::<String>("prompt")? {
        Some(text) => {
            Prompt::Text { text, add_special_tokens: fields.take("add_special_tokens")?.unwrap_or(true) }
        }
        None => {
            let messages::Given { prompt, media, .. } =
                messages::take(&mut fields).map_err(|error| match error.field() {
                    Some("messages") if error.message() == "is required" => {
                        Error::invalid("prompt", "is required, unless messages is given")
                    }
                    _ => error,
                })?;
            if let Some(item) = media.first() {
                return Err(Error::invalid(&item.path, "is not text, and only text can be tokenised"));
            }
            prompt
        }
    };
    fields.finish()?;
    Ok(TokenizeRequest { model, prompt, return_token_strs })
}

/// Turns a text or a conversation into tokens.
pub async fn tokenize(State(api): State<Api>, request: Request) -> Result<Json<Tokenized>, ApiError> {
    let entry = Entry::of(request.extensions());
    let TokenizeRequest { model, prompt, return_token_strs } = api.parse(request, parse_tokenize).await?;
    let model = api.generator.model_named(model.as_deref())?;
    // A token has at least one byte, so a text has at most as many tokens as bytes.
    entry.reserve(1, prompt.text_bytes() as u64)?;
    let work = TextWork { lane: prompt.lane(), share: entry.share(), bytes: prompt.text_bytes() };
    let special_tokens = api.generator.chat_special_tokens();
    let encode = move || {
        let (tokens, _) = to_tokens(prompt, &[], &model, Length::Any, special_tokens)?;
        let tokenizer = model.text.tokenizer.as_ref().filter(|_| return_token_strs);
        let token_strs = tokenizer.map(|tokenizer| tokenizer.spellings(&tokens));
        let max_model_len = model.max_model_len();
        Ok::<_, Error>(Tokenized { count: tokens.len(), max_model_len, tokens, token_strs })
    };
    let tokenized = api.generator.on_text(work, encode).await??;
    entry.charge(tokenized.count as u64);
    Ok(Json(tokenized))
}

/// Turns tokens into text. Special tokens are shown.
pub async fn detokenize(State(api): State<Api>, request: Request) -> Result<Json<Detokenized>, ApiError> {
    let entry = Entry::of(request.extensions());
    let (model, tokens) = api.parse(request, parse_detokenize).await?;
    let model = api.generator.model_named(model.as_deref())?;
    let count = tokens.len();
    entry.reserve(1, count as u64)?;
    let work = TextWork { lane: Lane::Parse, share: entry.share(), bytes: count * size_of::<u32>() };
    let prompt = api.generator.on_text(work, move || decode(&model, &tokens)).await??;
    entry.charge(count as u64);
    Ok(Json(Detokenized { prompt }))
}

/// Parses the model's name and the tokens.
pub(super) fn parse_detokenize(body: &[u8]) -> Result<(Option<String>, Vec<u32>), Error> {
    let mut fields = Fields::of_body(body, Scope::Detokenize)?;
    let parsed = (fields.take("model")?, fields.require("tokens")?);
    fields.finish()?;
    Ok(parsed)
}

pub(super) fn decode(model: &ServedModel, tokens: &[u32]) -> Result<String, Error> {
    let (count, most) = (tokens.len(), model.description.max_context_tokens);
    if count > most as usize {
        let message = format!("has {count} tokens, but may have at most {most}, the model's context");
        return Err(Error::invalid("tokens", message));
    }
    check_token_ids("tokens", tokens.iter().copied(), model.description.vocab_size)?;
    model.tokenizer("tokens", "text")?.decode(tokens, SpecialTokens::Include)
}
