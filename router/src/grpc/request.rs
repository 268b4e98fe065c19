//! Converts `tutti.v1.GenerateRequest` into the core's request, and the core's field names into the proto's.

use std::time::Duration;

use tonic::metadata::MetadataMap;
use tutti_proto::{
    cluster::v1::MediaKind,
    parameters::{self, DEFAULT_MAX_TOKENS},
    v1 as pb,
};
use tutti_runtime::Error;

use crate::{
    constraints::CONSTRAINT,
    generation::{Conversation, Detail, GenerationRequest, Media, Output, Placeholders, Prompt, Stopping},
    keys::ClientSalt,
    text::template::{Message, RenderOptions},
};

/// The kind of a request's prompt. The kind decides which proto field an error about the prompt names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptKind {
    Text,
    TokenIds,
    Chat,
}

/// Converts a request. The resulting timeout is the shorter of `timeout_ms` and the deadline in the gRPC metadata.
pub fn read(
    request: pb::GenerateRequest,
    metadata: &MetadataMap,
) -> Result<(GenerationRequest, PromptKind), Error> {
    let (prompt, kind) = prompt(request.prompt, !request.media.is_empty())?;
    let asked = request.timeout_ms.map(|ms| Duration::from_millis(ms.into()));
    let timeout = [asked, deadline(metadata)].into_iter().flatten().min();
    let stopping = request.stopping.unwrap_or_default();
    let output = request.output.unwrap_or_default();
    let generation = GenerationRequest {
        model: Some(request.model).filter(|name| !name.is_empty()),
        prompts: vec![prompt],
        media: request.media.into_iter().enumerate().map(media).collect::<Result<_, _>>()?,
        n: request.n,
        sampling: request.sampling.unwrap_or_default(),
        stopping: Stopping {
            max_tokens: stopping.max_tokens,
            default_max_tokens: Some(DEFAULT_MAX_TOKENS),
            min_tokens: stopping.min_tokens,
            stop: stopping.stop,
            include_stop: false,
            stop_token_ids: stopping.stop_token_ids,
            ignore_eos: stopping.ignore_eos,
        },
        output: Output {
            logprobs: output.logprobs,
            prompt_logprobs: output.prompt_logprobs,
            echo: output.echo,
            keep_special_tokens: output.keep_special_tokens,
        },
        priority: request.priority,
        timeout,
        cache_salt: request.cache_salt.as_deref().map(ClientSalt::new).transpose()?,
        constraint: request.constraint,
        reading: None,
    };
    Ok((generation, kind))
}

fn prompt(
    prompt: Option<pb::generate_request::Prompt>,
    has_media: bool,
) -> Result<(Prompt, PromptKind), Error> {
    use pb::generate_request::Prompt as Given;
    Ok(match prompt {
        None => return Err(Error::invalid("prompt", "is required: one of text, token_ids or chat")),
        Some(Given::Text(text)) => (Prompt::Text { text, add_special_tokens: true }, PromptKind::Text),
        Some(Given::TokenIds(tokens)) => (Prompt::Tokens(tokens.ids), PromptKind::TokenIds),
        Some(Given::Chat(chat)) => {
            if chat.messages.is_empty() {
                return Err(Error::invalid("chat.messages", "is empty"));
            }
            // A gRPC client has already written the placeholders of media into the text.
            let message = |m: pb::ChatMessage| Message::new(m.role, m.content);
            let messages = chat.messages.into_iter().map(message).collect();
            let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
            let placeholders = if has_media { Placeholders::Written } else { Placeholders::Inserted };
            let conversation = Conversation { messages, options, placeholders, further_bytes: 0 };
            (Prompt::Chat { conversation, add_special_tokens: false }, PromptKind::Chat)
        }
    })
}

fn media((index, media): (usize, pb::Media)) -> Result<Media, Error> {
    let path = format!("media[{index}]");
    let kind = match media.kind() {
        pb::media::Kind::Audio => MediaKind::Audio,
        pb::media::Kind::Image => MediaKind::Image,
        pb::media::Kind::Video => MediaKind::Video,
        pb::media::Kind::Unspecified => {
            return Err(Error::invalid(format!("{path}.kind"), "is required: AUDIO, IMAGE or VIDEO"));
        }
    };
    let pb::Media { format, data, frames, fps, sound_of_video: is_sound_of_video, .. } = media;
    let data = match (frames.is_empty(), data.is_empty()) {
        (true, _) => vec![data],
        (false, true) => frames,
        (false, false) => {
            return Err(Error::invalid(format!("{path}.frames"), "cannot be given beside data"));
        }
    };
    let (fps, detail) = (fps.map(f64::from), Detail::Full);
    Ok(Media { path, kind, format, data, url: None, fps, detail, is_sound_of_video })
}

/// The call's timeout from the `grpc-timeout` header: at most 8 digits and a unit. A malformed value is ignored, as in
/// gRPC's own servers.
fn deadline(metadata: &MetadataMap) -> Option<Duration> {
    let value = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    let amount: u64 = if digits.len() <= 8 { digits.parse().ok()? } else { return None };
    Some(match unit {
        "H" => Duration::from_secs(amount * 3600),
        "M" => Duration::from_secs(amount * 60),
        "S" => Duration::from_secs(amount),
        "m" => Duration::from_millis(amount),
        "u" => Duration::from_micros(amount),
        "n" => Duration::from_nanos(amount),
        _ => return None,
    })
}

/// Renames the field of an error from the core's name to the proto's.
pub fn respell(error: Error, kind: PromptKind) -> Error {
    let Some(field) = error.field() else { return error };
    if let Some(path) = field.strip_prefix(CONSTRAINT) {
        let spelt = in_constraint(path);
        return error.with_field(spelt);
    }
    let spelt = match field {
        "prompt" => match kind {
            PromptKind::Text => "text".to_owned(),
            PromptKind::TokenIds => "token_ids".to_owned(),
            PromptKind::Chat => "chat.messages".to_owned(),
        },
        "messages" => "chat.messages".to_owned(),
        _ => {
            match parameters::all().find(|parameter| parameter.name == field && !parameter.grpc.is_empty()) {
                Some(parameter) => parameter.grpc[0].to_owned(),
                None => return error,
            }
        }
    };
    error.with_field(spelt)
}

/// Names of the library in positions, and the proto's.
const POSITIONS: [(&str, &str); 6] = [
    (".schema", ".json_schema.schema"),
    (".choice[", ".choice.texts["),
    (".choice", ".choice.texts"),
    (".grammar", ".lark"),
    (".structural_tag.structures", ".structural_tags.tags"),
    (".structural_tag", ".structural_tags"),
];

/// The field at a position in a constraint. Metadata of gRPC is ASCII, and names of members need not be.
fn in_constraint(path: &str) -> String {
    let renamed = POSITIONS.iter().find_map(|(ours, protos)| Some((protos, path.strip_prefix(ours)?)));
    let (field, rest) = renamed.map_or(("", path), |(field, rest)| (*field, rest));
    let rest = rest.chars().map(|c| if c.is_ascii() { c } else { '?' });
    [CONSTRAINT, field].concat().chars().chain(rest).collect()
}

#[cfg(test)]
mod tests;
