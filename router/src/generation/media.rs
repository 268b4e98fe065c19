//! Placeholders of media in a prompt. The client's prompt has one placeholder token per item, or one per patch of
//! frames of a video whose frames have their times in front of them. The prompt sent to the conductor has one
//! placeholder token for every token that the item takes. A video and its sound have one placeholder, and their tokens
//! take turns.

mod turns;

use tutti_proto::{
    TokenLimit,
    cluster::v1::{self as pb, MediaKind},
    declaration::MediaForm,
};
use tutti_runtime::Error;

use self::turns::Stream;
use super::decode::{DecodedItem, Pairing};
use crate::served::ServedModel;

/// Replaces each placeholder by several copies: one for each token that the placeholder's item takes there. Returns the
/// token ids, and the items with their runs. Refuses placeholders that do not match the items one for one.
pub fn expand(
    ids: Vec<u32>,
    media: Vec<DecodedItem>,
    model: &ServedModel,
) -> Result<(Vec<u32>, Vec<pb::MediaItem>), Error> {
    let inputs = model.media_inputs();
    let is_placeholder = |id: &u32| inputs.iter().any(|input| input.placeholder == *id);
    let placeholders = ids.iter().filter(|id| is_placeholder(id)).count();
    let wanted: usize = media.iter().map(DecodedItem::placeholders).sum();
    if placeholders != wanted {
        let items = media.len();
        let names: Vec<String> = inputs.iter().map(|input| model.token_string(input.placeholder)).collect();
        let names = names.join(", ");
        let message = match wanted == items {
            true => format!(
                "has {placeholders} placeholders for media ({names}), but the request has {items} items of media"
            ),
            false => format!(
                "has {placeholders} placeholders for media ({names}), but the request's {items} items of media take \
                 {wanted}, because a video takes one for each patch of frames"
            ),
        };
        return Err(Error::invalid("prompt", message));
    }
    if media.is_empty() {
        return Ok((ids, Vec::new()));
    }
    let TokenLimit { tokens: limit, what } = model.description.request_limits().tokens;
    // A video with sound has two more sentinels than the client's prompt has.
    let taken = |item: &DecodedItem| match item.pairing {
        Pairing::Video(_) => u64::from(item.tokens) + 2,
        Pairing::Sound | Pairing::Alone => item.tokens.into(),
    };
    let tokens: u64 = media.iter().map(taken).sum();
    let total = tokens + (ids.len() - placeholders) as u64;
    if total > u64::from(limit) {
        let message = format!("has {total} tokens with its media, more than {limit}, which is {what}");
        return Err(Error::invalid("prompt", message));
    }
    let mut expanded = Vec::with_capacity(total as usize);
    let mut rest = ids.into_iter();
    let mut items = Vec::with_capacity(media.len());
    let mut media = media.into_iter();
    while let Some(DecodedItem { path, mut item, tokens, placeholder, times, pairing }) = media.next() {
        let runs = times.len().max(1) as u32;
        let mut runs_of_sound = Vec::new();
        while item.runs.len() < runs as usize {
            // The counts are equal, so every item has its placeholders.
            let Some(id) = rest.next() else { break };
            if !is_placeholder(&id) {
                expanded.push(id);
                continue;
            }
            if placeholder != id {
                // Each kind of media has its own placeholder, so the item and the placeholder are of different kinds.
                let kind = item.kind().as_str_name().to_lowercase();
                let message = format!("is {kind}, but its placeholder in the prompt is for other media");
                return Err(Error::invalid(path, message));
            }
            match (pairing, media.as_slice().first()) {
                (Pairing::Video(turns), Some(sound)) => {
                    let of_sound = sound.placeholder;
                    expanded.push(turns.sentinels.begin);
                    for (stream, tokens) in turns.runs(&item, tokens, sound.tokens) {
                        let (id, runs) = match stream {
                            Stream::Video => (id, &mut item.runs),
                            Stream::Sound => (of_sound, &mut runs_of_sound),
                        };
                        runs.push(copies(&mut expanded, id, tokens));
                    }
                    expanded.push(turns.sentinels.end);
                }
                _ => item.runs.push(copies(&mut expanded, id, tokens / runs)),
            }
        }
        items.push(item);
        if !runs_of_sound.is_empty() {
            items.extend(media.next().map(|sound| pb::MediaItem { runs: runs_of_sound, ..sound.item }));
        }
    }
    expanded.extend(rest);
    Ok((expanded, items))
}

/// Appends copies of a placeholder, and returns the run that they are.
fn copies(ids: &mut Vec<u32>, placeholder: u32, tokens: u32) -> pb::MediaRun {
    let first = ids.len();
    ids.resize(first + tokens as usize, placeholder);
    pb::MediaRun { first: first as u32, tokens }
}

/// Writes the times of frames into a text, in front of the placeholders of videos: each placeholder, with the sentinels
/// around it, becomes one for each patch of frames, behind the patch's time. The outer sentinels of the template go, as
/// in vLLM, so that each patch has one pair. Texts with other numbers of placeholders stay as they are, and are refused
/// when they are [expanded](expand).
pub fn write_times(text: String, media: &[DecodedItem], model: &ServedModel) -> String {
    let timed: Vec<&DecodedItem> = media.iter().filter(|item| !item.times.is_empty()).collect();
    if timed.is_empty() {
        return text;
    }
    let inputs = model.media_inputs();
    let declared = inputs.iter().find_map(|input| match input.form {
        MediaForm::Pixels(pixels) if input.kind == MediaKind::Video => Some((input, pixels.timestamps?)),
        _ => None,
    });
    let (Some((input, sentinels)), Some(tokenizer)) = (declared, &model.text.tokenizer) else { return text };
    let [pad, begin, end] =
        [input.placeholder, sentinels.begin, sentinels.end].map(|token| tokenizer.added_text(token));
    if pad.is_empty() || text.matches(pad.as_str()).count() != timed.len() {
        return text;
    }
    let mut written = String::with_capacity(text.len());
    let mut rest = text.as_str();
    for item in timed {
        let Some((before, behind)) = rest.split_once(pad.as_str()) else { break };
        written.push_str(before.strip_suffix(begin.as_str()).unwrap_or(before));
        for time in &item.times {
            [time, &begin, &pad, &end].into_iter().for_each(|piece| written.push_str(piece));
        }
        rest = behind.strip_prefix(end.as_str()).unwrap_or(behind);
    }
    written.push_str(rest);
    written
}

#[cfg(test)]
mod tests;
