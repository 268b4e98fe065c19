//! What a request brings to the door, and why it may be turned away there.

use std::{borrow::Cow, time::Duration};

pub use tutti_proto::MAX_PRIORITY;
use tutti_proto::{GraphKey, declaration::WalkId};

use crate::stopping::Stopping;

/// A request's worker graph: prefill segments in order, then a decode loop. Lengths only; the tokens are the engine's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphLaunch {
    /// Its name, unique among all that the scheduler holds.
    pub key: GraphKey,
    /// Which part of the request runs here.
    pub role: GraphRole,
    /// The prefill, at least one segment. Output of earlier incarnations belongs to the last one. Of a request that is
    /// only decoded here the tokens count, not the walks.
    pub prefill: Vec<Segment>,
    /// The walk of the passes after the prefill; needed when more than one token may be sampled.
    pub decode: Option<WalkId>,
    /// How many of the prefill's last tokens are output of earlier incarnations.
    pub generated: u32,
    /// When the output ends.
    pub stopping: Stopping,
    /// What is computed; without it, no page is shared with other requests.
    pub content: Option<Content>,
    /// Classes before (below 0) or behind (above 0) the ordinary one; see [`MAX_PRIORITY`].
    pub priority: i32,
    /// It is not admitted before its media are [here](crate::Scheduler::media_here), and in nobody's way until then.
    pub awaits_media: bool,
    /// When the request ends unless it has by itself, by the clock of [`Scheduler::plan`](crate::Scheduler::plan).
    pub deadline: Option<Duration>,
}

/// Which part of a request a worker runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GraphRole {
    /// All of it.
    #[default]
    Whole,
    /// Up to the first token. Unless that ends it, the request keeps its pages until its planes are with whoever goes on,
    /// and is then [let go](crate::Scheduler::complete_export).
    Prefill,
    /// What follows the first token. It holds its pages and takes part in no step until it is
    /// [handed over](crate::Scheduler::complete_import); from then on it is like any other.
    Decode,
    /// What turns media into embeddings: prefill segments of encoders' walks, which hold no pages. When they are done, it
    /// stays until its embeddings are with whoever prefills, and is then [let go](crate::Scheduler::complete_export).
    Encode,
}

/// In steps, of each priority class before the next: a request is served as if it had come so much earlier than one of
/// the next class, so the lowest waits longer, but never for ever.
pub const HEAD_START: i64 = 256;

/// The prefill's tokens. Pages are shared between requests whose content starts alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// One for each position of the prefill.
    pub tokens: Vec<u32>,
    /// What tokens do not tell, in the order of the prompt.
    pub media: Vec<MediaMark>,
    /// Whether pages of others may stand for computing: not where something is wanted of every position.
    pub may_reuse: bool,
}

/// Media among the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediaMark {
    /// The position of the item's first token.
    pub first: usize,
    /// Tells the item from any other.
    pub digest: [u8; 16],
}

impl Content {
    /// What is whole of the first `tokens` tokens, block by block: what each of them depends on beside the blocks before it.
    pub(crate) fn blocks(&self, tokens: usize, page_tokens: usize) -> impl Iterator<Item = Cow<'_, [u32]>> {
        (0..tokens / page_tokens).map(move |place| self.block(place, page_tokens))
    }

    /// The same of one block: its tokens, and behind them, for each item that begins in it, where it does and its digest.
    /// Longer than a page if there are any, and so never the same as one without.
    pub(crate) fn block(&self, place: usize, page_tokens: usize) -> Cow<'_, [u32]> {
        let positions = place * page_tokens..(place + 1) * page_tokens;
        let tokens = &self.tokens[positions.clone()];
        let from = self.media.partition_point(|mark| mark.first < positions.start);
        let to = self.media.partition_point(|mark| mark.first < positions.end);
        if from == to {
            return Cow::Borrowed(tokens);
        }
        let mut block = tokens.to_vec();
        for mark in &self.media[from..to] {
            block.push(mark.first as u32);
            block.extend(mark.digest.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)));
        }
        Cow::Owned(block)
    }
}

/// Part of a prefill: `tokens` tokens under one walk, whose kind says whether they may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// A chunkable or an atomic walk.
    pub walk: WalkId,
    /// At least 1.
    pub tokens: usize,
}

impl GraphLaunch {
    /// Tokens to compute before the first one is sampled.
    pub fn prefill_tokens(&self) -> usize {
        self.prefill.iter().map(|segment| segment.tokens).sum()
    }

    /// The prompt alone, without output of earlier incarnations.
    pub fn prompt_tokens(&self) -> usize {
        self.prefill_tokens().saturating_sub(self.generated as usize)
    }

    /// The most tokens the request may ever hold.
    pub fn max_total_tokens(&self) -> usize {
        self.prompt_tokens() + (self.stopping.max_tokens().max(self.generated)) as usize
    }
}

/// Why a launch is refused at the door, with the numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No prompt, or an empty segment of one.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The content does not describe the prefill.
    #[error("the content has {tokens} tokens, but the prefill {prefill}")]
    WrongContent {
        /// Tokens of the content.
        tokens: usize,
        /// Tokens of the prefill.
        prefill: usize,
    },
    /// The key is held already.
    #[error("graph {0} is already here")]
    Duplicate(GraphKey),
    /// The walk is not declared, or is of no kind that can stand there.
    #[error("walk {walk} cannot be run as {wanted}")]
    WrongWalk {
        /// The walk.
        walk: WalkId,
        /// What it would have to be.
        wanted: &'static str,
    },
    /// More than one token is asked for, without a walk to compute the later ones.
    #[error("max_tokens is {max_tokens}, but the graph has no decode walk")]
    NoDecodeWalk {
        /// What was asked for.
        max_tokens: u32,
    },
    /// Prompt and output together are longer than the model's context.
    #[error(
        "the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, but the context holds {max_context}"
    )]
    ContextTooSmall {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// What was asked for.
        max_tokens: u32,
        /// What there is.
        max_context: usize,
    },
    /// The pool could not hold the request even if it were alone.
    #[error("the request needs {needed} KV pages, but the pool has {total}")]
    PoolTooSmall {
        /// For prompt and output together.
        needed: usize,
        /// What there is.
        total: usize,
    },
    /// As many requests as may be held are held.
    #[error("{held} requests are held, the limit is {limit}")]
    QueueFull {
        /// Running and waiting.
        held: usize,
        /// The most that may be.
        limit: usize,
    },
}
