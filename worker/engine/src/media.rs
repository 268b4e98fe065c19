//! A request's media in the engine: the positions of the media in the prompt, the data to encode, and the embeddings.

use std::ops::Range;

use prost::bytes::Bytes;
use tutti_models::{EmbeddedRows, EncoderItem};
use tutti_proto::{
    CacheSalt,
    cluster::v1 as pb,
    declaration::{EncoderCall, MediaForm, MediaInput, ModelDeclaration, WalkId, media_tokens},
};
use tutti_runtime::Error;
use tutti_scheduler::MediaMark;

use crate::{
    encoder_cache::CallKey,
    positions::{self, Kind, Positions},
};

/// A call of an encoder: the walk that it runs, and the items that it encodes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Encoding {
    pub walk: WalkId,
    /// Range of the items' rows. Rows are counted over all calls of the request, end to end.
    pub rows: Range<usize>,
    /// Elements per row.
    pub width: usize,
    /// The data of one item, or of all items of a kind that is encoded together.
    pub items: Vec<EncodedItem>,
    /// The call's key in the cache of embeddings. `None` if an item has no digest.
    pub key: Option<CallKey>,
}

impl Encoding {
    /// Number of elements of the call's rows.
    pub fn values(&self) -> usize {
        self.rows.len() * self.width
    }
}

/// The data of an item to encode, and its grid.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct EncodedItem {
    pub data: Bytes,
    pub grid: Option<pb::MediaGrid>,
}

impl EncodedItem {
    pub fn view(&self) -> EncoderItem<'_> {
        EncoderItem { data: &self.data, grid: self.grid }
    }
}

/// Media of a request that this engine prefills.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Media {
    /// The items, in the order of their first tokens.
    pub items: Vec<Item>,
    /// Rows of all items' tokens, in the order of the encoders' calls, end to end; empty until they arrive.
    pub embeddings: Vec<f32>,
}

/// A media item of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Item {
    /// Positions of the item's tokens, ascending.
    pub runs: Vec<Range<usize>>,
    /// Elements per row. Kinds of media differ in this.
    pub width: usize,
    /// Index in the embeddings of the first element of the item's rows.
    pub first_value: usize,
    /// Rule of the item's positions.
    pub rule: Rule,
}

/// The rule of an item's positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rule {
    /// One rule counts through all runs.
    Through(Kind),
    /// The rule begins again in each run, because text stands between the frames.
    EachRun(Kind),
}

impl Item {
    fn tokens(&self) -> usize {
        self.runs.iter().map(Range::len).sum()
    }
}

impl Media {
    /// Number of elements of the rows of all items.
    pub fn values(&self) -> usize {
        self.items.iter().map(|item| item.tokens() * item.width).sum()
    }

    /// Returns the positions of the tokens of a prompt of `prompt` tokens with these media.
    pub fn positions(&self, prompt: usize) -> Positions {
        let of_item = |item: &Item| match item.rule {
            Rule::Through(kind) => vec![positions::Item { kind, runs: item.runs.clone() }],
            Rule::EachRun(kind) => {
                item.runs.iter().map(|run| positions::Item { kind, runs: vec![run.clone()] }).collect()
            }
        };
        Positions::new(prompt, &self.items.iter().flat_map(of_item).collect::<Vec<_>>())
    }

    /// Frees the embeddings if the first `computed` positions include all media, because the planes then hold them.
    /// True if this call freed them.
    pub fn consume(&mut self, computed: usize) -> bool {
        let end = self.items.iter().filter_map(|item| item.runs.last()).map(|run| run.end).max();
        end.is_some_and(|end| end <= computed) && !std::mem::take(&mut self.embeddings).is_empty()
    }

    /// Returns the embeddings of those `positions` of the prompt that stand for media. `first_token` is the index,
    /// within the forward pass, of the token at `positions.start`.
    pub fn rows(
        &self,
        positions: &Range<usize>,
        first_token: usize,
    ) -> impl Iterator<Item = EmbeddedRows<'_>> {
        let positions = positions.clone();
        let runs = self.items.iter().flat_map(|item| {
            let mut before = 0;
            item.runs.iter().map(move |run| {
                let first_value = item.first_value + before * item.width;
                before += run.len();
                (run, item.width, first_value)
            })
        });
        runs.filter_map(move |(run, width, first_value)| {
            let (start, end) = (run.start.max(positions.start), run.end.min(positions.end));
            if start >= end {
                return None;
            }
            let at = |position: usize| first_value + (position - run.start) * width;
            let values = self.embeddings.get(at(start)..at(end))?;
            Some(EmbeddedRows { first_token: first_token + start - positions.start, width, values })
        })
    }
}

/// Converts the media items of an encoder's graph into encoder calls. Only requests of the salt share embeddings.
pub(crate) fn encodings(
    mut items: Vec<pb::MediaItem>,
    salt: CacheSalt,
    walks: &[u32],
    model: &ModelDeclaration,
) -> Result<Vec<Encoding>, Error> {
    for (index, item) in items.iter().enumerate() {
        let input = model.media_input(item.kind());
        if input.is_none_or(|input| !walks.contains(&input.walk.0)) {
            let message = format!("{:?} is not what the graph encodes", item.kind());
            return Err(Error::invalid(format!("media[{index}]"), message));
        }
    }
    let tokens = media_tokens(model.media(), &items)
        .map_err(|error| Error::invalid(format!("media[{}].{}", error.item, error.field), error.problem))?;
    for (index, (item, tokens)) in items.iter().zip(tokens).enumerate() {
        let in_runs = item.tokens();
        if in_runs != tokens as usize {
            let message = format!("have {in_runs} tokens, but the item has {tokens}");
            return Err(Error::invalid(format!("media[{index}].runs"), message));
        }
    }
    let calls = calls(&items, model)?;
    let mut end = 0;
    let encoding = |EncoderCall { walk, items: indices, tokens }| {
        let input = model.media().iter().find(|input| input.walk == walk);
        let digest = |index: &usize| <[u8; 16]>::try_from(items[*index].digest.as_slice()).ok();
        let digests: Option<Vec<_>> = indices.iter().map(digest).collect();
        let data = |index: usize| {
            let pb::MediaItem { data, grid, .. } = &mut items[index];
            EncodedItem { data: std::mem::take(data), grid: *grid }
        };
        end += tokens;
        Encoding {
            walk,
            rows: end - tokens..end,
            width: input.map_or(0, |input| input.width as usize),
            items: indices.into_iter().map(data).collect(),
            key: digests.map(|items| CallKey { walk, salt, items }),
        }
    };
    Ok(calls.into_iter().map(encoding).collect())
}

fn calls(items: &[pb::MediaItem], model: &ModelDeclaration) -> Result<Vec<EncoderCall>, Error> {
    model.encoder_calls(items).map_err(|error| Error::invalid(error.field(), error.to_string()))
}

/// Locates media in a prompt. The returned marks distinguish prompts that have the same tokens but different media.
pub(crate) fn locate(
    items: &[pb::MediaItem],
    prompt: &[u32],
    model: &ModelDeclaration,
) -> Result<(Media, Vec<MediaMark>), Error> {
    let mut located = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        let field = |name: &str| format!("media[{index}].{name}");
        let kind = item.kind();
        let input = model.media_input(kind);
        let input =
            input.ok_or_else(|| Error::invalid(field("kind"), format!("the model takes no {kind:?}")))?;
        let (rule, tokens) = rule(item, input).map_err(|(name, why)| Error::invalid(field(name), why))?;
        let in_runs = item.tokens();
        if tokens.is_some_and(|tokens| tokens != in_runs) {
            return Err(Error::invalid(
                field("runs"),
                format!("have {in_runs} tokens, but not those of the grid"),
            ));
        }
        let runs = item.runs.iter().map(pb::MediaRun::range).collect();
        located.push(Item { runs, width: input.width as usize, first_value: 0, rule });
    }
    model.check_runs(prompt, items).map_err(|error| Error::invalid(error.field(), error.problem))?;
    let mut first_value = 0;
    for index in calls(items, model)?.into_iter().flat_map(|call| call.items) {
        located[index].first_value = first_value;
        first_value += located[index].tokens() * located[index].width;
    }
    let marks = marks(items, model)?;
    Ok((Media { items: located, embeddings: Vec::new() }, marks))
}

/// Returns the rule of an item's positions and, if the item has a grid, the number of its tokens.
fn rule(item: &pb::MediaItem, input: &MediaInput) -> Result<(Rule, Option<usize>), (&'static str, String)> {
    let tokens = input.check_shape(item)?.map(|tokens| tokens as usize);
    let (MediaForm::Pixels(pixels), Some(grid)) = (input.form, item.grid) else {
        return Ok((Rule::Through(Kind::Line), tokens));
    };
    let seconds = item.seconds_per_grid.unwrap_or(0.0);
    let grid_of_tokens = positions::Grid::new(
        [grid.height, grid.width].map(|axis| (axis / pixels.merge.max(1)) as usize),
        seconds,
        pixels.positions_per_second,
    );
    let kind = Kind::Grid(grid_of_tokens.ok_or_else(|| ("grid", "has no tokens".to_owned()))?);
    Ok((if pixels.timestamps.is_some() { Rule::EachRun(kind) } else { Rule::Through(kind) }, tokens))
}

/// Returns the marks of items. If items are encoded together, each embedding depends on all of them, so all are marked
/// at the position of the first.
fn marks(items: &[pb::MediaItem], model: &ModelDeclaration) -> Result<Vec<MediaMark>, Error> {
    let mut marks = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        let is_joint = model.media_input(item.kind()).is_some_and(|input| input.encoded_together);
        let is_first = !items[..index].iter().any(|other| other.kind == item.kind);
        let marked = match is_joint {
            true if is_first => &items[index..],
            true => &[],
            false => &items[index..=index],
        };
        let first = item.runs.first().map_or(0, |run| run.first as usize);
        for (offset, other) in marked.iter().enumerate().filter(|(_, other)| other.kind == item.kind) {
            let no_digest =
                |_| Error::invalid(format!("media[{}].digest", index + offset), "has no digest of 16 bytes");
            let digest = other.digest.as_slice().try_into().map_err(no_digest)?;
            marks.push(MediaMark { first, digest });
        }
    }
    Ok(marks)
}

#[cfg(test)]
mod tests;
