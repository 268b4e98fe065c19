//! A request's media as the engine holds them: where they stand, what is to be encoded, and what came of it.

use std::ops::Range;

use tutti_models::EmbeddedRows;
use tutti_proto::{
    cluster::v1 as pb,
    declaration::{ModelDeclaration, WalkId},
};
use tutti_runtime::Error;
use tutti_scheduler::MediaMark;

/// One item of an encoder's graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Encoding {
    pub walk: WalkId,
    /// Of the embeddings of all the request's items, end to end.
    pub rows: Range<usize>,
    pub data: Vec<u8>,
}

/// The items of a request that is prefilled here.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Media {
    /// Positions of each item's tokens, ascending.
    pub spans: Vec<Range<usize>>,
    /// Elements of an embedding.
    pub width: usize,
    /// Of all spans' tokens, end to end; empty until they are here.
    pub embeddings: Vec<f32>,
}

impl Media {
    /// Tokens that stand for media.
    pub fn tokens(&self) -> usize {
        self.spans.iter().map(Range::len).sum()
    }

    /// The embeddings of those of `positions` that stand for media, where the first of them is token `first_token` of a step.
    pub fn rows(
        &self,
        positions: &Range<usize>,
        first_token: usize,
    ) -> impl Iterator<Item = EmbeddedRows<'_>> {
        let positions = positions.clone();
        let mut before = 0;
        self.spans.iter().filter_map(move |span| {
            let first_row = before;
            before += span.len();
            let (start, end) = (span.start.max(positions.start), span.end.min(positions.end));
            if start >= end {
                return None;
            }
            let row = first_row + start - span.start;
            let values = self.embeddings.get(row * self.width..(row + end - start) * self.width)?;
            Some(EmbeddedRows { first_token: first_token + start - positions.start, values })
        })
    }
}

/// What an encoder's graph is to do.
pub(crate) fn encodings(
    items: Vec<pb::MediaItem>,
    walks: &[u32],
    model: &ModelDeclaration,
) -> Result<Vec<Encoding>, Error> {
    let mut rows = 0;
    let encoding = |(place, item): (usize, pb::MediaItem)| {
        let refused = |why: String| Error::invalid(format!("media[{place}]"), why);
        let input = model.media_input(item.kind());
        let input = input.filter(|input| walks.contains(&input.walk.0));
        let input =
            input.ok_or_else(|| refused(format!("{:?} is not what the graph encodes", item.kind())))?;
        let (tokens, bytes) = (item.tokens as usize, item.data.len());
        if tokens == 0 || input.tokens(bytes) != tokens {
            return Err(refused(format!("has {bytes} bytes, which are not {tokens} tokens")));
        }
        let first = rows;
        rows += tokens;
        Ok(Encoding { walk: input.walk, rows: first..first + tokens, data: item.data })
    };
    items.into_iter().enumerate().map(encoding).collect()
}

/// Where a prompt's media stand, and the marks by which prompts with other media are told from it.
pub(crate) fn placed(
    items: &[pb::MediaItem],
    prompt: &[u32],
    model: &ModelDeclaration,
) -> Result<(Media, Vec<MediaMark>), Error> {
    let (mut media, mut marks) = (Media::default(), Vec::with_capacity(items.len()));
    for (place, item) in items.iter().enumerate() {
        let refused = |why: String| Error::invalid(format!("media[{place}]"), why);
        let kind = item.kind();
        let input = model.media_input(kind).ok_or_else(|| refused(format!("the model takes no {kind:?}")))?;
        let span = item.first as usize..item.first as usize + item.tokens as usize;
        let before = media.spans.last().map_or(0, |span| span.end);
        let tokens = prompt.get(span.clone()).filter(|tokens| !tokens.is_empty() && span.start >= before);
        if tokens.is_none_or(|tokens| tokens.iter().any(|token| *token != input.placeholder)) {
            return Err(refused(format!("{span:?} of the prompt are not its placeholder tokens")));
        }
        let digest = item.digest.as_slice().try_into();
        let digest = digest.map_err(|_| refused("has no digest of 16 bytes".into()))?;
        marks.push(MediaMark { first: span.start, digest });
        media.width = input.width as usize;
        media.spans.push(span);
    }
    Ok((media, marks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_the_same_wherever_a_prompt_is_cut() {
        let spans = vec![2..5, 5..6, 9..12];
        let embeddings: Vec<f32> = (0..14).map(|value| value as f32).collect();
        let media = Media { spans, width: 2, embeddings };
        assert_eq!(media.tokens(), 7);
        let of = |positions: Range<usize>| -> Vec<(usize, f32)> {
            let start = positions.start;
            let rows = media.rows(&positions, 100).flat_map(|rows| {
                let places = (rows.first_token..).flat_map(|token| [token, token]);
                places.zip(rows.values.to_vec()).collect::<Vec<_>>()
            });
            rows.map(|(token, value)| (token - 100 + start, value)).collect()
        };
        let whole = of(0..14);
        assert_eq!(whole.len(), 14);
        assert_eq!(whole.iter().map(|(_, value)| *value).collect::<Vec<_>>(), media.embeddings);
        for cut in 0..14 {
            assert_eq!([of(0..cut), of(cut..14)].concat(), whole, "cut at {cut}");
        }
        assert!(of(6..9).is_empty() && of(0..2).is_empty());
    }
}
