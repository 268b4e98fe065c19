//! Validation of a request's media: kinds, formats, sizes, and their placeholders in the prompt.

use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};

use tutti_proto::{
    RequestParts,
    cluster::v1 as pb,
    declaration::{ModelDeclaration, WalkId, media_tokens},
};
use tutti_runtime::Error;

/// Refuses media that the model cannot encode. Returns the walks (named passes over the model's nodes) that encode the
/// media, each walk once.
pub fn check(spec: &RequestParts, model: &ModelDeclaration) -> Result<Vec<WalkId>, Error> {
    let tokens = media_tokens(model.media(), &spec.media);
    let tokens = tokens
        .map_err(|error| Error::invalid(format!("media[{}].{}", error.item, error.field), error.problem))?;
    for (index, (item, tokens)) in spec.media.iter().zip(tokens).enumerate() {
        let in_runs = item.tokens();
        if in_runs != tokens as usize {
            let message = format!("have {in_runs} tokens, but the item has {tokens}");
            return Err(Error::invalid(format!("media[{index}].runs"), message));
        }
    }
    model
        .check_runs(&spec.prompt, &spec.media)
        .map_err(|error| Error::invalid(error.field(), error.problem))?;
    let mut walks = Vec::new();
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
    let tokens: usize = spec.media.iter().map(|item| item.tokens()).sum();
    if placeholders == tokens {
        return Ok(());
    }
    let items = spec.media.len();
    let message = format!(
        "has {placeholders} placeholder tokens of media, but the {items} items of media take {tokens}"
    );
    Err(Error::invalid("prompt", message))
}

/// Computes digests of media. Items have equal digests if everything that decides their embeddings and positions is
/// equal. The keys are random per process, so that no client can construct two items with the same digest.
#[derive(Debug, Default)]
pub struct Digest {
    keys: [RandomState; 2],
}

impl Digest {
    /// Sets each item's digest. An item that is encoded together with others has these others in its digest.
    pub fn of(&self, media: &mut [pb::MediaItem], model: &ModelDeclaration) {
        let alone: Vec<Vec<u8>> = media.iter().map(|item| self.digest(&Shape::of(item))).collect();
        let joint =
            |item: &pb::MediaItem| model.media_input(item.kind()).is_some_and(|input| input.encoded_together);
        for index in 0..media.len() {
            let kind = media[index].kind;
            let others = media.iter().zip(&alone).filter(|(other, _)| other.kind == kind);
            let digest = match joint(&media[index]) {
                true => {
                    let (others, own): (Vec<&Vec<u8>>, _) =
                        (others.map(|(_, digest)| digest).collect(), &alone[index]);
                    self.digest(&(own, others))
                }
                false => alone[index].clone(),
            };
            media[index].digest = digest;
        }
    }

    fn digest(&self, value: &impl Hash) -> Vec<u8> {
        let mut halves = Halves(self.keys.each_ref().map(RandomState::build_hasher));
        value.hash(&mut halves);
        halves.0.iter().flat_map(|half| half.finish().to_le_bytes()).collect()
    }
}

/// Bytes that both halves of a digest read before the next, so that memory is read once.
const PIECE_BYTES: usize = 16 << 10;

/// The hashers of the two halves of a digest.
struct Halves([DefaultHasher; 2]);

impl Hasher for Halves {
    fn write(&mut self, bytes: &[u8]) {
        for piece in bytes.chunks(PIECE_BYTES) {
            self.0.iter_mut().for_each(|half| half.write(piece));
        }
    }

    fn finish(&self) -> u64 {
        self.0[0].finish()
    }
}

/// Everything that decides an item's embeddings and its positions, without other items.
#[derive(Hash)]
struct Shape<'a> {
    kind: i32,
    format: &'a str,
    data: &'a [u8],
    grid: Option<[u32; 3]>,
    seconds_per_grid: Option<u32>,
}

impl<'a> Shape<'a> {
    fn of(item: &'a pb::MediaItem) -> Self {
        let pb::MediaItem { kind, format, data, digest: _, runs: _, grid, seconds_per_grid } = item;
        let axes = |grid: pb::MediaGrid| [grid.frames, grid.height, grid.width];
        Self {
            kind: *kind,
            format,
            data,
            grid: grid.map(axes),
            seconds_per_grid: seconds_per_grid.map(f32::to_bits),
        }
    }
}

#[cfg(test)]
mod tests;
