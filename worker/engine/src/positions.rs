//! Positions of a request's tokens on three axes: time, height and width (M-RoPE, Wang et al., arXiv:2409.12191, §2.1).
//!
//! Positions follow from the runs of media in the prompt, and never from token ids, because a client may write the text
//! of a sentinel. They are a function of the request alone, and positions of a prefix depend on that prefix alone. So
//! chunks, prefix hits and transfers need nothing more. The rules and the order of roundings are those of
//! `get_rope_index` in transformers (`models/qwen3_omni_moe`, `models/qwen3_vl`), whose positions are f32 and not
//! always whole.

use std::{num::NonZeroUsize, ops::Range};

/// Positions of one token.
pub(crate) type Axes = [f32; 3];

/// A media item of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Item {
    pub kind: Kind,
    /// Indices of the item's tokens in the prompt, ascending. An item has several runs if its tokens take turns with
    /// those of another item, as a video's do with those of its sound.
    pub runs: Vec<Range<usize>>,
}

/// The rule of an item's positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// Each token is one further on all axes.
    Line,
    /// Tokens stand on a grid.
    Grid(Grid),
}

/// The grid of the tokens of a picture or of frames, frame by frame and line by line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Grid {
    /// Tokens per frame.
    tokens: NonZeroUsize,
    /// Tokens per line.
    width: NonZeroUsize,
    /// Seconds from a frame to the next; 0 for a picture.
    seconds: f32,
    /// Positions per second.
    per_second: f32,
}

impl Grid {
    /// Returns the grid of frames of `height × width` tokens. `None` if a frame has no token, or more than any prompt.
    pub fn new([height, width]: [usize; 2], seconds: f32, per_second: f32) -> Option<Self> {
        let tokens = NonZeroUsize::new(height.checked_mul(width)?)?;
        Some(Self { tokens, width: NonZeroUsize::new(width)?, seconds, per_second })
    }
}

/// The positions of a request's tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Positions {
    /// Number of tokens of the prompt.
    prompt: usize,
    /// Segments of the prompt with one rule each, ascending and without gaps.
    segments: Vec<Segment>,
    /// Difference of the position and the index of a token behind the prompt.
    delta: f32,
}

#[derive(Clone, Debug, PartialEq)]
struct Segment {
    /// Index of the first token.
    first: usize,
    /// Position from which the rule counts.
    start: f32,
    /// Number of tokens of the item in front of this segment.
    before: usize,
    kind: Kind,
}

impl Segment {
    fn at(&self, index: usize) -> Axes {
        let offset = self.before + (index - self.first);
        match self.kind {
            Kind::Line => [self.start + offset as f32; 3],
            Kind::Grid(Grid { tokens, width, seconds, per_second }) => {
                let (frame, cell) = (offset / tokens, offset % tokens);
                let time = frame as f32 * seconds * per_second;
                [time, (cell / width) as f32, (cell % width) as f32].map(|axis| axis + self.start)
            }
        }
    }
}

/// A run of an item. `item` is the item's index.
struct Run {
    item: usize,
    tokens: Range<usize>,
}

impl Positions {
    /// Computes the positions of a prompt of `prompt` tokens with these items, whose runs do not overlap.
    pub fn new(prompt: usize, items: &[Item]) -> Self {
        let of_item = |(item, runs): (usize, &Item)| {
            runs.runs.iter().map(move |tokens| Run { item, tokens: tokens.clone() }).collect::<Vec<_>>()
        };
        let mut runs: Vec<Run> = items.iter().enumerate().flat_map(of_item).collect();
        runs.sort_by_key(|run| run.tokens.start);
        let mut build = Builder::new(items);
        for (index, run) in runs.iter().enumerate() {
            // A video with sound stands between two sentinels on each side, and any other item between one.
            let sentinels = if follows_closely(items, &runs[index..]) { 2 } else { 1 };
            build.text_up_to(run.tokens.start, sentinels);
            build.run(run);
            build.closing =
                if index > 0 && follows_closely(items, &runs[index - 1..]) { 2 } else { sentinels };
        }
        build.text_up_to(prompt, 0);
        Self { prompt, delta: build.most + 1.0 - prompt as f32, segments: build.segments }
    }

    /// Returns the positions of the token at `index`. A generated token has the same positions whether it is decoded or
    /// prefilled again.
    pub fn at(&self, index: usize) -> Axes {
        let next = self.segments.partition_point(|segment| segment.first <= index);
        match next.checked_sub(1).map(|last| &self.segments[last]) {
            Some(segment) if index < self.prompt => segment.at(index),
            _ => [index as f32 + self.delta; 3],
        }
    }
}

/// True if the first run is of frames and the second run, of sound, or the reverse, begins at its end. Such items have
/// the same first position. A still picture has no sound.
fn follows_closely(items: &[Item], runs: &[Run]) -> bool {
    let [one, other, ..] = runs else { return false };
    one.tokens.end == other.tokens.start
        && match (items[one.item].kind, items[other.item].kind) {
            (Kind::Grid(grid), Kind::Line) | (Kind::Line, Kind::Grid(grid)) => grid.seconds > 0.0,
            _ => false,
        }
}

/// The positions of a prompt up to some token.
struct Builder<'a> {
    items: &'a [Item],
    segments: Vec<Segment>,
    /// Number of tokens so far.
    end: usize,
    /// Position of the next token of text.
    next: f32,
    /// The largest position on any axis so far.
    most: f32,
    /// The last position of the last text.
    most_of_line: f32,
    /// Number of sentinels behind the last item.
    closing: usize,
    /// First position of each item, and its number of tokens so far.
    begun: Vec<Option<(f32, usize)>>,
    /// The item of the last run.
    last: Option<usize>,
}

impl<'a> Builder<'a> {
    fn new(items: &'a [Item]) -> Self {
        Self {
            items,
            segments: Vec::new(),
            end: 0,
            next: 0.0,
            most: -1.0,
            most_of_line: -1.0,
            closing: 0,
            begun: vec![None; items.len()],
            last: None,
        }
    }

    /// Adds text up to index `end`. The last `opening` tokens are sentinels in front of an item. The reference computes
    /// sentinels apart from the text between them, which rounds at other places.
    fn text_up_to(&mut self, end: usize, opening: usize) {
        let tokens = end.saturating_sub(self.end);
        let closing = self.closing.min(tokens);
        let opening = opening.min(tokens - closing);
        if tokens == 0 {
            return;
        }
        self.last = None;
        self.line(closing);
        if closing > 0 {
            self.next = self.most_of_line + 1.0;
        }
        self.line(tokens - closing - opening);
        self.line(opening);
    }

    /// Adds tokens of text.
    fn line(&mut self, tokens: usize) {
        if tokens == 0 {
            return;
        }
        let segment = Segment { first: self.end, start: self.next, before: 0, kind: Kind::Line };
        [self.most_of_line, ..] = segment.at(self.end + tokens - 1);
        self.most = self.most.max(self.most_of_line);
        self.segments.push(segment);
        self.end += tokens;
        self.next += tokens as f32;
    }

    /// Adds a run of an item.
    fn run(&mut self, Run { item, tokens }: &Run) {
        // The sound of a video begins at the position where the video begins.
        let of_frames = |last: &usize| matches!(self.items[*last].kind, Kind::Grid(_));
        let is_sound = self.items[*item].kind == Kind::Line;
        let beside = self.last.filter(of_frames).filter(|_| is_sound).and_then(|last| self.begun[last]);
        let (start, before) = self.begun[*item].unwrap_or((beside.map_or(self.next, |(start, _)| start), 0));
        let segment = Segment { first: tokens.start, start, before, kind: self.items[*item].kind };
        let most = tokens.clone().flat_map(|index| segment.at(index)).fold(f32::MIN, f32::max);
        // Text continues from the last run, even if an earlier one reached further.
        self.next = most + 1.0;
        self.most = self.most.max(most);
        self.begun[*item] = Some((start, before + tokens.len()));
        self.segments.push(segment);
        (self.end, self.last) = (tokens.end, Some(*item));
    }
}

#[cfg(test)]
mod tests;
