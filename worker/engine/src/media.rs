//! A request's media in the engine: the positions of the media in the prompt, the data to encode, and the embeddings.

use std::ops::Range;

use tutti_models::EmbeddedRows;
use tutti_proto::{
    cluster::v1 as pb,
    declaration::{EncoderCall, ModelDeclaration, WalkId, media_tokens},
};
use tutti_runtime::Error;
use tutti_scheduler::MediaMark;

use crate::positions::{Item, Kind, Positions};

/// A call of an encoder: the walk that it runs, and the items that it encodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Encoding {
    pub walk: WalkId,
    /// Range of the items' embeddings. Embeddings are counted over all items of the request, end to end.
    pub rows: Range<usize>,
    /// The items' data: one item, or all items of a kind that is encoded together.
    pub items: Vec<Vec<u8>>,
}

/// Media of a request that this engine prefills.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Media {
    /// Positions of each item's tokens, ascending.
    pub ranges: Vec<Range<usize>>,
    /// Elements per row of each item. Kinds of media differ in this.
    pub widths: Vec<usize>,
    /// Rows of all items' tokens, end to end; empty until they arrive.
    pub embeddings: Vec<f32>,
}

impl Media {
    /// Number of prompt tokens that stand for media.
    pub fn tokens(&self) -> usize {
        self.ranges.iter().map(Range::len).sum()
    }

    /// Returns the positions of the tokens of a prompt with these media. All media of this build are sounds.
    pub fn positions(&self, prompt: usize) -> Positions {
        let item = |range: &Range<usize>| Item { kind: Kind::Line, runs: vec![range.clone()] };
        Positions::new(prompt, &self.ranges.iter().map(item).collect::<Vec<_>>())
    }

    /// Frees the embeddings if the first `computed` positions include all media, because the planes then hold them.
    /// True if this call freed them.
    pub fn consume(&mut self, computed: usize) -> bool {
        let is_consumed = self.ranges.last().is_some_and(|last| last.end <= computed);
        is_consumed && !std::mem::take(&mut self.embeddings).is_empty()
    }

    /// Returns the embeddings of those `positions` of the prompt that stand for media. `first_token` is the index,
    /// within the forward pass, of the token at `positions.start`.
    pub fn rows(
        &self,
        positions: &Range<usize>,
        first_token: usize,
    ) -> impl Iterator<Item = EmbeddedRows<'_>> {
        let positions = positions.clone();
        let mut before = 0;
        self.ranges.iter().zip(&self.widths).filter_map(move |(range, &width)| {
            let first_value = before;
            before += range.len() * width;
            let (start, end) = (range.start.max(positions.start), range.end.min(positions.end));
            if start >= end {
                return None;
            }
            let at = |position: usize| first_value + (position - range.start) * width;
            let values = self.embeddings.get(at(start)..at(end))?;
            Some(EmbeddedRows { first_token: first_token + start - positions.start, width, values })
        })
    }
}

/// Converts the media items of an encoder's graph into encoder calls.
pub(crate) fn encodings(
    mut items: Vec<pb::MediaItem>,
    walks: &[u32],
    model: &ModelDeclaration,
) -> Result<Vec<Encoding>, Error> {
    for (index, item) in items.iter().enumerate() {
        let refused = |why: String| Error::invalid(format!("media[{index}]"), why);
        let input = model.media_input(item.kind());
        if input.is_none_or(|input| !walks.contains(&input.walk.0)) {
            return Err(refused(format!("{:?} is not what the graph encodes", item.kind())));
        }
    }
    let tokens = media_tokens(model.media(), &items);
    let tokens =
        tokens.map_err(|error| Error::invalid(format!("media[{}]", error.item), error.to_string()))?;
    for (index, (item, tokens)) in items.iter().zip(tokens).enumerate() {
        let in_runs = item.tokens();
        if in_runs != tokens as usize {
            let message = format!("has runs of {in_runs} tokens, but data of {tokens}");
            return Err(Error::invalid(format!("media[{index}]"), message));
        }
    }
    let calls = model.encoder_calls(&items);
    let calls = calls.map_err(|error| Error::invalid(error.field(), error.to_string()))?;
    let mut end = 0;
    let encoding = |EncoderCall { walk, items: range, tokens }| {
        let items = range.into_iter().map(|index| std::mem::take(&mut items[index].data)).collect();
        end += tokens;
        Encoding { walk, rows: end - tokens..end, items }
    };
    Ok(calls.into_iter().map(encoding).collect())
}

/// Locates media in a prompt. The returned marks distinguish prompts that have the same tokens but different media. If
/// items are encoded together, each embedding depends on all items, so all items are marked at the position of the
/// first item.
pub(crate) fn locate(
    items: &[pb::MediaItem],
    prompt: &[u32],
    model: &ModelDeclaration,
) -> Result<(Media, Vec<MediaMark>), Error> {
    let (mut media, mut marks) = (Media::default(), Vec::with_capacity(items.len()));
    for (index, item) in items.iter().enumerate() {
        let refused = |why: String| Error::invalid(format!("media[{index}]"), why);
        let kind = item.kind();
        let input = model.media_input(kind).ok_or_else(|| refused(format!("the model takes no {kind:?}")))?;
        let [run] = &item.runs[..] else { return Err(refused("has several runs".into())) };
        let range = run.range();
        let before = media.ranges.last().map_or(0, |range| range.end);
        let tokens = prompt.get(range.clone()).filter(|tokens| !tokens.is_empty() && range.start >= before);
        if tokens.is_none_or(|tokens| tokens.iter().any(|token| *token != input.placeholder)) {
            return Err(refused(format!("{range:?} of the prompt are not its placeholder tokens")));
        }
        let is_first = !items[..index].iter().any(|other| other.kind == item.kind);
        let marked = match input.encoded_together {
            true if is_first => &items[index..],
            true => &[],
            false => &items[index..=index],
        };
        for (offset, other) in marked.iter().enumerate().filter(|(_, other)| other.kind == item.kind) {
            let no_digest =
                |_| Error::invalid(format!("media[{}]", index + offset), "has no digest of 16 bytes");
            let digest = other.digest.as_slice().try_into().map_err(no_digest)?;
            marks.push(MediaMark { first: range.start, digest });
        }
        media.widths.push(input.width as usize);
        media.ranges.push(range);
    }
    Ok((media, marks))
}

#[cfg(test)]
mod tests;
