//! The number of tokens of media. The router expands placeholders by it, and conductor and engine check it.
//!
//! Grids and data come from other processes, so each product is bounded before it is computed.

use std::ops::Range;

use super::{ClipInput, MediaForm, MediaInput, ModelDeclaration, PixelInput};
use crate::cluster::v1 as pb;

/// The most patches along one axis of a grid. The product of three such numbers and of the sizes of a patch fits in 128
/// bits.
const MAX_AXIS: u32 = 1 << 20;
/// The largest value of [`pb::MediaItem::seconds_per_grid`].
const MAX_SECONDS_PER_GRID: f32 = 3600.0;
/// Colours of a pixel.
const CHANNELS: u128 = 3;
/// Bytes per sample of a clip.
const SAMPLE_BYTES: usize = size_of::<f32>();

/// The reason why an item has no number of tokens.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct MediaItemError {
    /// Index of the item.
    pub item: usize,
    /// The item's field at fault.
    pub field: &'static str,
    /// The problem, as a predicate such as "is empty".
    pub problem: String,
}

/// A problem of an item: the field at fault, and a predicate.
type Problem = (&'static str, String);

/// Returns the number of tokens of each item of a request, in order. Each is at least 1. The items' runs are not read.
///
/// Checks what the number follows from: format, data, grid and seconds.
pub fn media_tokens(inputs: &[MediaInput], items: &[pb::MediaItem]) -> Result<Vec<u32>, MediaItemError> {
    let longest = |kind: i32| {
        let clips = items.iter().filter(|item| item.kind == kind);
        clips.map(|item| item.data.len() / SAMPLE_BYTES).max().unwrap_or(0)
    };
    let tokens = |(index, item): (usize, &pb::MediaItem)| {
        let kind = item.kind();
        let input = inputs.iter().find(|input| input.kind == kind);
        let no_input = || {
            let name = kind.as_str_name().to_lowercase();
            ("kind", format!("is {name}, which the model does not take"))
        };
        input
            .ok_or_else(no_input)
            .and_then(|input| input.item_tokens(item, longest(item.kind)))
            .map_err(|(field, problem)| MediaItemError { item: index, field, problem })
    };
    items.iter().enumerate().map(tokens).collect()
}

impl MediaInput {
    /// Number of tokens of an item whose data are here. `longest` is the number of samples of the request's longest
    /// clip.
    fn item_tokens(&self, item: &pb::MediaItem, longest: usize) -> Result<u32, Problem> {
        let pb::MediaItem { format, data, .. } = item;
        if self.formats.is_empty() && !format.is_empty() {
            return Err(("format", format!("is {format:?}, but the data have one form only")));
        }
        if !self.formats.is_empty() && !self.formats.contains(format) {
            let known = self.formats.join(", ");
            return Err(("format", format!("is {format:?}, but must be one of {known}")));
        }
        let bytes = data.len();
        if bytes == 0 {
            return Err(("data", "is empty".into()));
        }
        let tokens = self.check_shape(item)?;
        match self.form {
            MediaForm::Bytes { per_token } => checked(bytes.div_ceil(per_token.max(1) as usize) as u128),
            MediaForm::Clips(_) if !bytes.is_multiple_of(SAMPLE_BYTES) => Err((
                "data",
                format!("has {bytes} bytes, which are no whole samples of {SAMPLE_BYTES} bytes"),
            )),
            MediaForm::Clips(clips) => match clips.tokens(bytes / SAMPLE_BYTES, longest) {
                0 => Err(("data", "is too short: it has no frame".into())),
                _ if longest < clips.shortest as usize => {
                    let shortest = clips.shortest;
                    Err(("data", format!("is too short: a request's longest clip needs {shortest} samples")))
                }
                tokens => checked(tokens as u128),
            },
            MediaForm::Pixels(pixels) => {
                let grid = item.grid.unwrap_or_default();
                let frame = pixels.frame_bytes(&grid);
                // The last patch of frames may have fewer frames than the others.
                let last = u128::from(grid.frames) * u128::from(pixels.temporal);
                let frames = bytes as u128 / frame;
                let is_whole = (bytes as u128).is_multiple_of(frame)
                    && frames <= last
                    && frames + u128::from(pixels.temporal) > last;
                // A still picture has one frame, whatever the depth of a patch.
                let fits =
                    if item.kind() == pb::MediaKind::Video { is_whole } else { bytes as u128 == frame };
                match (fits, tokens) {
                    (true, Some(tokens)) => Ok(tokens),
                    _ => Err(("data", format!("has {bytes} bytes, but a frame of the grid has {frame}"))),
                }
            }
        }
    }

    /// Checks the grid and the seconds of an item, whose data need not be here. Returns the number of its tokens if it
    /// follows from the grid.
    pub fn check_shape(&self, item: &pb::MediaItem) -> Result<Option<u32>, (&'static str, String)> {
        let is_video = item.kind() == pb::MediaKind::Video;
        match item.seconds_per_grid {
            None if is_video => return Err(("seconds_per_grid", "is missing".into())),
            Some(_) if !is_video => return Err(("seconds_per_grid", "belongs to videos only".into())),
            Some(seconds) if !(seconds > 0.0 && seconds <= MAX_SECONDS_PER_GRID) => {
                let problem = format!("is {seconds}, but must be above 0 and at most {MAX_SECONDS_PER_GRID}");
                return Err(("seconds_per_grid", problem));
            }
            _ => {}
        }
        match (self.form, &item.grid) {
            (MediaForm::Pixels(pixels), Some(grid)) => {
                if !is_video && grid.frames != 1 {
                    return Err((
                        "grid",
                        format!("has {} frames, but is that of a still picture", grid.frames),
                    ));
                }
                pixels.tokens(grid).map(Some).map_err(|problem| ("grid", problem))
            }
            (MediaForm::Pixels(_), None) => Err(("grid", "is missing".into())),
            (_, Some(_)) => Err(("grid", "belongs to images and videos of pixels only".into())),
            (_, None) => Ok(None),
        }
    }
}

impl ModelDeclaration {
    /// Refuses items whose runs are not placeholder tokens of their own in the prompt. Runs ascend within an item, and
    /// so do the first runs of the items.
    pub fn check_runs(&self, prompt: &[u32], items: &[pb::MediaItem]) -> Result<(), RunError> {
        let mut taken: Vec<Range<usize>> = Vec::new();
        let mut first = None;
        for (index, item) in items.iter().enumerate() {
            let placeholder = self.media_input(item.kind()).map(|input| input.placeholder);
            let refused = |run: usize, problem: String| RunError { item: index, run, problem };
            if item.runs.first().map(|run| run.first) <= first {
                return Err(refused(0, "does not begin behind the item before it".into()));
            }
            first = item.runs.first().map(|run| run.first);
            if let Some(patches) = self.patches_with_times(item) {
                let tokens = item.runs.first().map_or(0, |run| run.tokens);
                if item.runs.len() != patches || item.runs.iter().any(|run| run.tokens != tokens) {
                    let problem = format!(
                        "must be one of {patches} runs of equal length, one for each patch of frames"
                    );
                    return Err(refused(0, problem));
                }
            }
            let mut end = 0;
            for (at, run) in item.runs.iter().enumerate() {
                let range = run.range();
                let own = prompt.get(range.clone()).filter(|tokens| !tokens.is_empty() && range.start >= end);
                if own.is_none_or(|tokens| tokens.iter().any(|token| Some(*token) != placeholder)) {
                    let (first, tokens) = (run.first, run.tokens);
                    let problem = format!(
                        "begins at {first}, but the prompt has no {tokens} placeholders of its own there"
                    );
                    return Err(refused(at, problem));
                }
                end = range.end;
                taken.push(range);
            }
        }
        taken.sort_by_key(|range| range.start);
        match taken.windows(2).find(|pair| pair[1].start < pair[0].end) {
            None => Ok(()),
            Some(pair) => {
                let start = pair[1].start;
                let at = |item: &pb::MediaItem| item.runs.iter().rposition(|run| run.first as usize == start);
                let found = items.iter().enumerate().rev().find_map(|(index, item)| Some((index, at(item)?)));
                let (item, run) = found.unwrap_or_default();
                let problem =
                    format!("begins at {start}, but the prompt has no placeholders of its own there");
                Err(RunError { item, run, problem })
            }
        }
    }

    /// Number of patches of frames of a video whose patches stand apart, behind their times.
    fn patches_with_times(&self, item: &pb::MediaItem) -> Option<usize> {
        match self.media_input(item.kind())?.form {
            MediaForm::Pixels(PixelInput { timestamps: Some(_), .. })
                if item.kind() == pb::MediaKind::Video =>
            {
                item.grid.map(|grid| grid.frames as usize)
            }
            _ => None,
        }
    }
}

/// A run of an item that is not where the prompt has placeholders of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunError {
    /// Index of the item.
    pub item: usize,
    /// Index of the run.
    pub run: usize,
    /// The problem, as a predicate.
    pub problem: String,
}

impl RunError {
    /// The request's field at fault.
    pub fn field(&self) -> String {
        format!("media[{}].runs[{}]", self.item, self.run)
    }
}

impl pb::MediaRun {
    /// The run's positions in the prompt.
    pub fn range(&self) -> Range<usize> {
        self.first as usize..self.first as usize + self.tokens as usize
    }
}

fn checked(tokens: u128) -> Result<u32, Problem> {
    u32::try_from(tokens).map_err(|_| ("data", format!("has {tokens} tokens, more than any prompt")))
}

impl ClipInput {
    /// Number of frames of a clip of `samples` samples, in a request whose longest clip has `longest` samples.
    pub fn frames(&self, samples: usize, longest: usize) -> usize {
        let hop = self.hop.max(1) as usize;
        samples.div_ceil(hop).min(longest / hop)
    }

    /// Number of tokens of `frames` frames.
    pub fn tokens_of_frames(&self, frames: usize) -> usize {
        let chunk = self.chunk.max(1) as usize;
        let halved = |frames: usize| (0..self.halvings).fold(frames, |frames, _| frames.div_ceil(2));
        (frames / chunk).saturating_mul(halved(chunk)).saturating_add(halved(frames % chunk))
    }

    /// Number of tokens of a clip of `samples` samples, in a request whose longest clip has `longest` samples.
    pub fn tokens(&self, samples: usize, longest: usize) -> usize {
        self.tokens_of_frames(self.frames(samples, longest))
    }
}

impl PixelInput {
    /// Number of tokens of a grid, at least 1. The error is a predicate about the grid.
    pub fn tokens(&self, grid: &pb::MediaGrid) -> Result<u32, String> {
        let pb::MediaGrid { frames, height, width } = *grid;
        let axes = [frames, height, width];
        if axes.iter().any(|&axis| axis == 0 || axis > MAX_AXIS) {
            return Err(format!(
                "is {frames} × {height} × {width}, but each axis must be from 1 to {MAX_AXIS}"
            ));
        }
        let merge = self.merge.max(1);
        if !height.is_multiple_of(merge) || !width.is_multiple_of(merge) {
            return Err(format!("is {height} × {width} patches, but tokens are of {merge} × {merge}"));
        }
        let tokens = [frames, height / merge, width / merge].map(u128::from).into_iter().product::<u128>();
        u32::try_from(tokens).map_err(|_| format!("has {tokens} tokens, more than any prompt"))
    }

    /// Bytes per frame of a grid that [`tokens`](Self::tokens) accepts.
    fn frame_bytes(&self, grid: &pb::MediaGrid) -> u128 {
        [grid.height, self.patch, grid.width, self.patch].map(u128::from).into_iter().product::<u128>()
            * CHANNELS
    }
}

#[cfg(test)]
mod tests;
