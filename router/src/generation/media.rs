//! Placeholders of media in a prompt: the client's prompt has one placeholder token per item. The prompt sent to the
//! conductor has one placeholder token for every token that the item takes.

use tutti_proto::{
    TokenLimit,
    cluster::v1 as pb,
    declaration::{MediaInput, media_tokens},
};
use tutti_runtime::Error;

use super::request::Media;
use crate::served::ServedModel;

/// Replaces each placeholder by several copies: one for each token that the placeholder's item takes. Returns the token
/// ids, and the items with their positions. Refuses items that the model does not accept, and placeholders that do not
/// match the items one for one.
pub fn expand(
    ids: Vec<u32>,
    media: Vec<Media>,
    model: &ServedModel,
) -> Result<(Vec<u32>, Vec<pb::MediaItem>), Error> {
    let inputs = model.media_inputs();
    let of_items = media.iter().map(|item| input_of(item, &inputs)).collect::<Result<Vec<_>, Error>>()?;
    let is_placeholder = |id: &u32| inputs.iter().any(|input| input.placeholder == *id);
    let placeholders = ids.iter().filter(|id| is_placeholder(id)).count();
    if placeholders != media.len() {
        let items = media.len();
        let names: Vec<String> = inputs.iter().map(|input| model.token_string(input.placeholder)).collect();
        let message = format!(
            "has {placeholders} placeholders for media ({}), but the request has {items} items of media",
            names.join(", ")
        );
        return Err(Error::invalid("prompt", message));
    }
    if media.is_empty() {
        return Ok((ids, Vec::new()));
    }
    let TokenLimit { tokens: limit, what } = model.description.request_limits().tokens;
    let paths: Vec<String> = media.iter().map(|item| item.path.clone()).collect();
    let items: Vec<pb::MediaItem> = media.into_iter().map(item_of).collect();
    let counts = media_tokens(&inputs, &items)
        .map_err(|error| Error::invalid(format!("{}.{}", paths[error.item], error.field), error.problem))?;
    let total =
        counts.iter().map(|&tokens| u64::from(tokens)).sum::<u64>() + (ids.len() - placeholders) as u64;
    if total > u64::from(limit) {
        let message = format!("has {total} tokens with its media, more than {limit}, which is {what}");
        return Err(Error::invalid("prompt", message));
    }
    let (mut expanded, mut expanded_items) =
        (Vec::with_capacity(total as usize), Vec::with_capacity(items.len()));
    let mut waiting = of_items.into_iter().zip(counts).zip(items).zip(paths);
    for id in ids {
        if !is_placeholder(&id) {
            expanded.push(id);
            continue;
        }
        // The counts are equal, so every placeholder has an item.
        let Some((((input, tokens), mut item), path)) = waiting.next() else { continue };
        if input.placeholder != id {
            // Each kind of media has its own placeholder, so the item and the placeholder are of different kinds.
            let kind = item.kind().as_str_name().to_lowercase();
            return Err(Error::invalid(
                path,
                format!("is {kind}, but its placeholder in the prompt is for other media"),
            ));
        }
        let first = expanded.len();
        expanded.resize(first + tokens as usize, id);
        item.runs = vec![pb::MediaRun { first: first as u32, tokens }];
        expanded_items.push(item);
    }
    Ok((expanded, expanded_items))
}

/// Returns the item that the conductor receives, without its runs.
fn item_of(Media { kind, format, data, .. }: Media) -> pb::MediaItem {
    pb::MediaItem { kind: kind.into(), format, data, ..pb::MediaItem::default() }
}

fn input_of<'a>(item: &Media, inputs: &'a [MediaInput]) -> Result<&'a MediaInput, Error> {
    let kind = item.kind.as_str_name().to_lowercase();
    let Some(input) = inputs.iter().find(|input| input.kind == item.kind) else {
        return Err(Error::invalid(&item.path, format!("is {kind}, which the model does not take")));
    };
    if !input.formats.contains(&item.format) {
        let (format, known) = (&item.format, input.formats.join(", "));
        let message = format!("is {format:?}, but {kind} must be one of {known}");
        return Err(Error::invalid(format!("{}.format", item.path), message));
    }
    if item.data.is_empty() {
        return Err(Error::invalid(format!("{}.data", item.path), "is empty"));
    }
    Ok(input)
}

#[cfg(test)]
mod tests;
