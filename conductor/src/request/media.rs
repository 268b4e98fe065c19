//! Media at the door: what the model does not take, or what does not stand where it says, is refused here.

use std::hash::{BuildHasher, RandomState};

use tutti_proto::{
    cluster::v1 as pb,
    declaration::{ModelDeclaration, WalkId},
};
use tutti_runtime::Error;

/// Refuses media that the model cannot run. Gives the walks that encode them, each once.
pub fn check(spec: &pb::RequestSpec, model: &ModelDeclaration) -> Result<Vec<WalkId>, Error> {
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
            let message = format!(
                "first: is {first}, where the prompt has not {tokens} placeholders of its own for it"
            );
            return Err(refused(message));
        }
        end = first + tokens;
        if !walks.contains(&input.walk) {
            walks.push(input.walk);
        }
    }
    check_placeholders(spec, model)?;
    Ok(walks)
}

/// A placeholder without an item would be computed as a word that the model has never seen.
fn check_placeholders(spec: &pb::RequestSpec, model: &ModelDeclaration) -> Result<(), Error> {
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

/// Tells data from any other. Its keys are of this process alone, so that nobody can look for two that it takes for the same.
#[derive(Debug, Default)]
pub struct Digest {
    keys: [RandomState; 2],
}

impl Digest {
    /// Sets the digest of each item.
    pub fn of(&self, media: &mut [pb::MediaItem]) {
        for item in media {
            let data = (item.kind, &item.format, &item.data);
            item.digest = self.keys.iter().flat_map(|key| key.hash_one(data).to_le_bytes()).collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use tutti_proto::declaration::{MediaInput, NodeId, Walk, WalkKind};

    use super::*;

    const HERE: u32 = 9;

    fn model() -> ModelDeclaration {
        let walk = |kind| Walk { name: "w".into(), nodes: vec![NodeId(0)], kind };
        let walks = vec![walk(WalkKind::Atomic { batched_by: WalkId(1) }), walk(WalkKind::Mixed)];
        let input = MediaInput {
            kind: pb::MediaKind::Audio,
            walk: WalkId(0),
            placeholder: HERE,
            bytes_per_token: 4,
            width: 2,
            formats: vec!["wav".into()],
        };
        ModelDeclaration::new(vec!["audio_encoder".into()], walks, vec![])
            .unwrap()
            .with_media(vec![input])
            .unwrap()
    }

    fn item(first: u32, bytes: usize) -> pb::MediaItem {
        let (kind, format, data) = (pb::MediaKind::Audio.into(), "wav".into(), vec![7; bytes]);
        pb::MediaItem { kind, format, data, first, tokens: bytes.div_ceil(4) as u32, digest: vec![] }
    }

    fn good() -> pb::RequestSpec {
        let prompt = vec![1, HERE, HERE, 2, HERE];
        pb::RequestSpec { prompt, media: vec![item(1, 5), item(4, 1)], ..Default::default() }
    }

    #[track_caller]
    fn refused(change: impl FnOnce(&mut pb::RequestSpec), field: &str, words: &str) {
        let mut spec = good();
        change(&mut spec);
        let error = check(&spec, &model()).unwrap_err();
        assert!(error.field() == Some(field) && error.message().contains(words), "{error:?}");
    }

    #[test]
    fn what_stands_where_it_says_passes() {
        assert_eq!(check(&good(), &model()), Ok(vec![WalkId(0)]));
        let text = pb::RequestSpec { prompt: vec![1, 2], ..Default::default() };
        assert_eq!(check(&text, &model()), Ok(vec![]));
    }

    #[test]
    fn what_does_not_is_refused_with_its_index() {
        refused(|spec| spec.media[1].kind = 0, "media[1]", "does not take");
        refused(|spec| spec.media[0].format = "mp3".into(), "media[0]", "\"mp3\"");
        refused(|spec| spec.media[0].data.clear(), "media[0]", "empty");
        refused(|spec| spec.media[0].tokens = 3, "media[0]", "5 bytes are 2 tokens");
        refused(|spec| spec.media[1].first = 3, "media[1]", "first: is 3");
        refused(|spec| spec.media[1].first = u32::MAX, "media[1]", "first");
        refused(|spec| spec.media[1].first = 2, "media[1]", "of its own");
        refused(|spec| spec.prompt.push(HERE), "prompt", "4 placeholder tokens");
        refused(|spec| drop(spec.media.pop()), "prompt", "take 2");
        let text_only = ModelDeclaration::new(vec![], vec![], vec![]).unwrap();
        assert!(check(&good(), &text_only).unwrap_err().message().contains("does not take"));
    }

    #[test]
    fn equal_data_has_equal_digests_and_other_data_others() {
        let digests = Digest::default();
        let mut media = [item(0, 5), item(3, 5), item(0, 6), item(0, 5)];
        media[3].data[0] = 8;
        digests.of(&mut media);
        assert_eq!((media[0].digest.len(), &media[0].digest), (16, &media[1].digest));
        assert_ne!(media[0].digest, media[2].digest);
        assert_ne!(media[0].digest, media[3].digest);
    }
}
