//! From a prompt with one placeholder token for each item of media to one with as many as the item has tokens.

use tutti_proto::{cluster::v1 as pb, declaration::MediaInput};
use tutti_runtime::Error;

use super::request::Media;
use crate::served::ServedModel;

/// The tokens with room for the media, and the media where they stand. Items that the model does not take, and placeholders
/// that do not match them one for one, are refused.
pub fn place(
    ids: Vec<u32>,
    media: Vec<Media>,
    model: &ServedModel,
) -> Result<(Vec<u32>, Vec<pb::MediaItem>), Error> {
    let inputs = model.media_inputs();
    let of_items = media.iter().map(|item| input_of(item, &inputs)).collect::<Result<Vec<_>, Error>>()?;
    let is_placeholder = |id: &u32| inputs.iter().any(|input| input.placeholder == *id);
    let places = ids.iter().filter(|id| is_placeholder(id)).count();
    if places != media.len() {
        let items = media.len();
        let names: Vec<String> = inputs.iter().map(|input| model.token_string(input.placeholder)).collect();
        let message = format!(
            "has {places} places for media ({}), but the request has {items} items of media",
            names.join(", ")
        );
        return Err(Error::invalid("prompt", message));
    }
    if media.is_empty() {
        return Ok((ids, Vec::new()));
    }
    let (limit, what) = model.token_limit();
    let tokens = of_items.iter().zip(&media).map(|(input, item)| input.tokens(item.data.len()) as u64);
    let total = tokens.sum::<u64>() + (ids.len() - places) as u64;
    if total > u64::from(limit) {
        let message = format!("has {total} tokens with its media, more than {limit}, which is {what}");
        return Err(Error::invalid("prompt", message));
    }
    let (mut placed, mut items) = (Vec::with_capacity(total as usize), Vec::with_capacity(media.len()));
    let mut waiting = of_items.into_iter().zip(media);
    for id in ids {
        if !is_placeholder(&id) {
            placed.push(id);
            continue;
        }
        // There is one for each.
        let Some((input, item)) = waiting.next() else { continue };
        if input.placeholder != id {
            let kind = item.kind.as_str_name().to_lowercase();
            return Err(Error::invalid(
                item.path,
                format!("is {kind}, but its place in the prompt is for other media"),
            ));
        }
        let (first, tokens) = (placed.len(), input.tokens(item.data.len()));
        placed.resize(first + tokens, id);
        let (kind, first, tokens) = (item.kind.into(), first as u32, tokens as u32);
        let Media { format, data, .. } = item;
        items.push(pb::MediaItem { kind, format, data, first, tokens, digest: Vec::new() });
    }
    Ok((placed, items))
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
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::served::{SamplingDefaults, ServedText};

    const HERE: u32 = 9;

    fn model(takes_audio: bool) -> ServedModel {
        let input = pb::MediaInput {
            kind: pb::MediaKind::Audio.into(),
            walk: 0,
            placeholder_token_id: HERE,
            bytes_per_token: 4,
            width: 2,
            formats: vec!["wav".into()],
        };
        let declaration = pb::ModelDeclaration {
            media: if takes_audio { vec![input] } else { vec![] },
            ..Default::default()
        };
        let text = ServedText { tokenizer: None, template: None, defaults: SamplingDefaults::default() };
        let description = pb::ModelDescription {
            max_context_tokens: 16,
            max_request_tokens: 16,
            declaration: Some(declaration),
            ..Default::default()
        };
        ServedModel { description, text: Arc::new(text) }
    }

    fn audio(bytes: usize) -> Media {
        let path = "media[0]".into();
        Media { path, kind: pb::MediaKind::Audio, format: "wav".into(), data: vec![1; bytes] }
    }

    #[test]
    fn each_item_has_the_room_that_its_bytes_take() {
        let (ids, items) = place(vec![1, HERE, 2, HERE], vec![audio(9), audio(4)], &model(true)).unwrap();
        assert_eq!(ids, [1, HERE, HERE, HERE, 2, HERE]);
        let places: Vec<_> = items.iter().map(|item| (item.first, item.tokens, item.data.len())).collect();
        assert_eq!(places, [(1, 3, 9), (5, 1, 4)]);
        assert_eq!(place(vec![1, HERE], vec![], &model(false)).unwrap(), (vec![1, HERE], vec![]));
    }

    #[test]
    fn what_cannot_be_placed_is_named() {
        let refused = |ids: &[u32], media: Vec<Media>, takes_audio, field: &str, words: &str| {
            let error = place(ids.to_vec(), media, &model(takes_audio)).unwrap_err();
            assert!(error.field() == Some(field) && error.message().contains(words), "{error:?}");
        };
        refused(&[1, HERE], vec![], true, "prompt", "has 1 places");
        refused(&[1], vec![audio(4)], true, "prompt", "has 0 places");
        refused(&[HERE], vec![audio(4)], false, "media[0]", "does not take");
        refused(
            &[HERE],
            vec![Media { format: "mp3".into(), ..audio(4) }],
            true,
            "media[0].format",
            "one of wav",
        );
        refused(&[HERE], vec![audio(0)], true, "media[0].data", "empty");
        refused(&[HERE], vec![audio(68)], true, "prompt", "17 tokens");
    }
}
