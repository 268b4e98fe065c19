//! Chat messages: roles, text, media, reasoning, and calls of tools with their results. Other members of OpenAI's
//! messages are refused by name.

use serde_json::value::RawValue;
use tutti_proto::{cluster::v1::MediaKind, parameters::Scope};
use tutti_runtime::Error;

use super::{
    fields::{self, Fields},
    history::History,
    media as media_parts, reasoning,
    tools::{self, GivenTools},
};
use crate::{
    generation::{Conversation, Media, Placeholders, Prompt, Tool},
    text::template::{Content, ContentPart, Message, RenderOptions},
};

/// Maximum number of messages per conversation, and of content parts per message.
const MAX_MESSAGES: usize = 16_384;
/// Maximum size in bytes of the JSON of the template's variables. A parsed value takes many times the bytes of its
/// JSON.
const MAX_VARIABLE_BYTES: usize = 64 << 10;

/// The parts of a request that make up its conversation.
pub struct Given {
    /// The conversation.
    pub prompt: Prompt,
    /// The media items of all messages, in order.
    pub media: Vec<Media>,
    /// The declared tools.
    pub tools: Vec<Tool>,
    /// Size of their JSON in bytes.
    pub tool_bytes: usize,
    /// Number of calls in the messages.
    pub earlier_calls: usize,
}

/// Takes the members of a request that make up a conversation of at least one message.
pub fn take(fields: &mut Fields<'_>) -> Result<Given, Error> {
    let given: Option<Vec<&RawValue>> = fields.take_list("messages", MAX_MESSAGES)?;
    let given = given.ok_or_else(|| Error::invalid(fields.name("messages"), "is required"))?;
    if given.is_empty() {
        return Err(Error::invalid("messages", "is empty"));
    }
    let mut media = GivenMedia { items: Vec::new(), have_sound: take_sound_in_videos(fields)? };
    let mut history = History::default();
    let messages: Vec<Message> = given
        .into_iter()
        .enumerate()
        .map(|(i, value)| message(&format!("messages[{i}]"), value, &mut media, &mut history))
        .collect::<Result<_, _>>()?;
    let media = media.items;
    let GivenTools { shown, tools, bytes } = tools::take(fields)?;
    let continue_final_message: bool = fields.take_or_default("continue_final_message")?;
    let add_generation_prompt: Option<bool> = fields.take("add_generation_prompt")?;
    if continue_final_message && add_generation_prompt == Some(true) {
        let message =
            "cannot be true together with add_generation_prompt: a turn is either continued or begun";
        return Err(Error::invalid("continue_final_message", message));
    }
    let options = RenderOptions {
        add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
        continue_final_message,
        variables: variables(fields)?,
        tools: shown,
        switches: reasoning::switches(fields)?,
    };
    // Usually false, since templates write the special tokens.
    let add_special_tokens = fields.take_or_default("add_special_tokens")?;
    let reasoning = messages.iter().flat_map(|message| &message.reasoning).map(String::len);
    let further_bytes = bytes + history.bytes + reasoning.sum::<usize>();
    let conversation =
        Conversation { messages, options, placeholders: Placeholders::Inserted, further_bytes };
    let prompt = Prompt::Chat { conversation, add_special_tokens };
    Ok(Given { prompt, media, tools, tool_bytes: bytes, earlier_calls: history.calls })
}

/// The media of messages.
struct GivenMedia {
    /// The items, in order.
    items: Vec<Media>,
    /// True if the part behind each video is its sound.
    have_sound: bool,
}

/// Takes `mm_processor_kwargs`, as in vLLM. True if the part behind each video is its sound.
fn take_sound_in_videos(fields: &mut Fields<'_>) -> Result<bool, Error> {
    let name = fields.name("mm_processor_kwargs");
    let Some(value) = fields.take_raw("mm_processor_kwargs") else { return Ok(false) };
    let mut fields = Fields::of_value(&name, value)?;
    let have_sound = fields.take_or_default("use_audio_in_video")?;
    fields.finish()?;
    Ok(have_sound)
}

/// Takes `chat_template_kwargs`, the variables of the template.
fn variables(fields: &mut Fields<'_>) -> Result<serde_json::Map<String, serde_json::Value>, Error> {
    let name = fields.name("chat_template_kwargs");
    let Some(value) = fields.take_raw("chat_template_kwargs") else { return Ok(serde_json::Map::new()) };
    let bytes = value.get().len();
    if bytes > MAX_VARIABLE_BYTES {
        let message = format!("has {bytes} bytes, but may have at most {MAX_VARIABLE_BYTES}");
        return Err(Error::invalid(name, message));
    }
    fields::parse(&name, value)
}

fn message(
    path: &str,
    value: &RawValue,
    media: &mut GivenMedia,
    history: &mut History,
) -> Result<Message, Error> {
    let mut fields = Fields::of_object(path, value, Scope::Message)?;
    let role: String = fields.require("role")?;
    let name = fields.take("name")?;
    let content_name = fields.name("content");
    let content = match fields.take_raw("content") {
        // OpenAI's answers with tools have no text, and clients send them back.
        None if role == "assistant" => Content::Text(String::new()),
        None => return Err(Error::invalid(content_name, "is required")),
        Some(value) if value.get().starts_with('[') => Content::List(parts(&content_name, value, media)?),
        Some(value) => Content::Text(fields::parse(&content_name, value)?),
    };
    let calls = history.take_calls(&mut fields, &role)?;
    let call_id = history.take_call_id(&mut fields)?;
    let reasoning = reasoning(&mut fields)?;
    fields.finish()?;
    Ok(Message { role, content, name, reasoning, calls, call_id })
}

/// Takes `reasoning_content`, or its other name `reasoning`. Clients send back what answers have under both.
fn reasoning(fields: &mut Fields<'_>) -> Result<Option<String>, Error> {
    let (first, second): (Option<String>, Option<String>) =
        (fields.take("reasoning_content")?, fields.take("reasoning")?);
    Ok(first.or(second).filter(|text| !text.is_empty()))
}

/// Parses content parts. Adds the media items to `media`, in order. Sound of a video is no part of its own for the
/// template, because it has no placeholder.
fn parts(path: &str, value: &RawValue, media: &mut GivenMedia) -> Result<Vec<ContentPart>, Error> {
    let given: Vec<&RawValue> = fields::list(path, value, MAX_MESSAGES)?;
    let mut parts = Vec::with_capacity(given.len());
    // The path of a video, until its sound comes.
    let mut silent: Option<String> = None;
    let refused = |video: String| {
        let message = "has no sound: with use_audio_in_video, the next part of the message must be its sound, an \
                       input_audio or audio_url";
        Error::invalid(video, message)
    };
    for (i, part) in given.into_iter().enumerate() {
        let path = format!("{path}[{i}]");
        let mut fields = Fields::of_value(&path, part)?;
        let kind: String = fields.require("type")?;
        match kind.as_str() {
            "text" => {
                if let Some(video) = silent.take() {
                    return Err(refused(video));
                }
                parts.push(ContentPart::Text(fields.require("text")?));
            }
            name => {
                let Some(item) = media_parts::take(name, &path, &mut fields) else {
                    let known: Vec<&str> = ["text"].into_iter().chain(media_parts::part_types()).collect();
                    let message =
                        format!("{kind:?} is not supported: it must be one of {}", known.join(", "));
                    return Err(Error::invalid(fields.name("type"), message));
                };
                let mut item = item?;
                match silent.take() {
                    Some(_) if item.kind == MediaKind::Audio => item.is_sound_of_video = true,
                    Some(video) => return Err(refused(video)),
                    None => parts.push(ContentPart::Media { kind: item.kind, placeholder: String::new() }),
                }
                silent = (media.have_sound && item.kind == MediaKind::Video).then(|| item.path.clone());
                media.items.push(item);
            }
        }
        fields.finish()?;
    }
    silent.map_or(Ok(parts), |video| Err(refused(video)))
}

#[cfg(test)]
mod tests;
