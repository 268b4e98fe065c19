//! Validation of a request's media: kinds, formats, sizes, and their placeholders in the prompt.

use std::hash::{BuildHasher, RandomState};

use tutti_proto::{
    RequestParts,
    cluster::v1 as pb,
    declaration::{ModelDeclaration, WalkId},
};
use tutti_runtime::Error;

/// Refuses media that the model cannot encode. Returns the walks (named passes over the model's nodes) that encode the
/// media, each walk once.
pub fn check(spec: &RequestParts, model: &ModelDeclaration) -> Result<Vec<WalkId>, Error> {
    let mut walks = Vec::new();
    let mut end = 0;
    for (index, item) in spec.media.iter().enumerate() {
        let refused = |why: String| Error::invalid(format!("media[{index}]"), why);
        let kind = item.kind().as_str_name().to_lowercase();
        let input = model.media_input(item.kind());
        let input = input.ok_or_else(|| refused(format!("is {kind}, which the model does not take")))?;
        if !input.formats.contains(&item.format) {
            let (format, known) = (&item.format, input.formats.join(", "));
            return Err(refused(format!("format: is {format:?}, but {kind} must be one of {known}")));
        }
        let (bytes, tokens) = (item.data.len(), item.tokens as usize);
        if bytes == 0 {
            return Err(refused("data: is empty".into()));
        }
        if input.tokens(bytes) != tokens {
            let wanted = input.tokens(bytes);
            return Err(refused(format!("tokens: is {tokens}, but {bytes} bytes are {wanted} tokens")));
        }
        let (first, placeholder) = (item.first as usize, input.placeholder);
        let stands = spec.prompt.get(first..first.saturating_add(tokens));
        if first < end || stands.is_none_or(|tokens| tokens.iter().any(|token| *token != placeholder)) {
            let message =
                format!("first: is {first}, but the prompt has no {tokens} placeholders of its own there");
            return Err(refused(message));
        }
        end = first + tokens;
    }
    let calls = model.encoder_calls(&spec.media);
    for call in calls.map_err(|error| Error::invalid(error.field(), error.to_string()))? {
        if !walks.contains(&call.walk) {
            walks.push(call.walk);
        }
    }
    check_placeholders(spec, model)?;
    Ok(walks)
}

/// Refuses a prompt with placeholders that belong to no media item, because the model would read these placeholders as
/// unknown words.
fn check_placeholders(spec: &RequestParts, model: &ModelDeclaration) -> Result<(), Error> {
    let is_placeholder = |token: &&u32| model.media().iter().any(|input| input.placeholder == **token);
    let placeholders = spec.prompt.iter().filter(is_placeholder).count();
    let tokens: usize = spec.media.iter().map(|item| item.tokens as usize).sum();
    if placeholders == tokens {
        return Ok(());
    }
    let items = spec.media.len();
    let message = format!(
        "has {placeholders} placeholder tokens of media, but the {items} items of media take {tokens}"
    );
    Err(Error::invalid("prompt", message))
}

/// Computes digests of media. Equal data has equal digests. The keys are random per process, so that no client can
/// construct two items with the same digest.
#[derive(Debug, Default)]
pub struct Digest {
    keys: [RandomState; 2],
}

impl Digest {
    /// Sets each item's digest.
    pub fn of(&self, media: &mut [pb::MediaItem]) {
        for item in media {
            let data = (item.kind, &item.format, &item.data);
            item.digest = self.keys.iter().flat_map(|key| key.hash_one(data).to_le_bytes()).collect();
        }
    }
}

#[cfg(test)]
mod tests;
