//! The launch of a worker graph, and the reasons for which a launch is refused.

use std::{borrow::Cow, time::Duration};

pub use tutti_proto::MAX_PRIORITY;
use tutti_proto::{CacheSalt, GraphKey, declaration::WalkId};

use crate::{shares::ShareId, stopping::Stopping, tokens::Tokens};

/// A request's worker graph: prefill segments in order, then a decode loop. A segment has a length but no tokens,
/// because the engine holds the tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphLaunch {
    /// The graph's name, unique among all graphs that the scheduler holds.
    pub key: GraphKey,
    /// The phases of the request that this worker runs.
    pub role: GraphRole,
    /// Segments of the prefill in order, at least one. The last segment includes the output of earlier incarnations
    /// (tries) of the request. With [`GraphRole::Decode`], the segments' walks are ignored.
    pub prefill: Vec<Segment>,
    /// The walk of the passes after the prefill. Required if more than one token may be sampled.
    pub decode: Option<WalkId>,
    /// Number of the prefill's last tokens that are output of earlier incarnations.
    pub generated: u32,
    /// Rules by which the output ends.
    pub stopping: Stopping,
    /// The prefill's content. Without content, the request shares no pages with other requests.
    pub content: Option<Content>,
    /// Priority class, from `-MAX_PRIORITY` to [`MAX_PRIORITY`]; 0 is the default. A lower class has a [head
    /// start](HEAD_START) over a higher one.
    pub priority: i32,
    /// The share that the request counts against. Memory and steps are divided fairly among the shares.
    pub share: ShareId,
    /// True if the mask of each token depends on the token before it. The request then has at most one row in flight
    /// from which a token is sampled.
    pub is_masked: bool,
    /// True if the request is admitted only once its [first mask is ready](crate::Scheduler::mask_ready). Until then
    /// the request delays no other request.
    pub awaits_mask: bool,
    /// True if the request is admitted only after the embeddings of its media [have
    /// arrived](crate::Scheduler::media_here). Until then the request delays no other request.
    pub awaits_media: bool,
    /// True if the prefill runs to its end in the step in which it begins, also if the settings let others be cut.
    pub prefill_is_whole: bool,
    /// Time at which the scheduler ends the request if the request has not ended before. The time is on the same clock
    /// as the argument `now` of [`Scheduler::plan`](crate::Scheduler::plan).
    pub deadline: Option<Duration>,
}

/// The phases of a request that one worker graph runs. The conductor's `GraphRole` has the same variants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GraphRole {
    /// All phases.
    #[default]
    Whole,
    /// The prefill and the first token. Unless the first token ends the request, the request keeps its pages until the
    /// decoding worker has the planes and [the export is complete](crate::Scheduler::complete_export).
    Prefill,
    /// The tokens after the first. The request holds its pages but takes part in no step until [the import is
    /// complete](crate::Scheduler::complete_import); from then on the request runs like any other.
    Decode,
    /// The encoding of media into embeddings. The prefill segments have the encoders' walks and hold no pages. After
    /// the last segment the graph stays in the scheduler until the prefilling worker has the embeddings and [the export
    /// is complete](crate::Scheduler::complete_export).
    Encode,
}

/// Head start of each priority class over the next one, in steps. If two requests of neighbouring classes arrive
/// together, the more urgent one is ordered as if it had arrived this many steps before the other one. Requests of the
/// lowest class wait longer, but not for ever.
pub const HEAD_START: i64 = 256;

/// The prefill's tokens and media. Requests whose contents start with equal blocks can share pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// One token for each position of the prefill.
    pub tokens: Tokens,
    /// Media among the tokens, in the order of the prompt.
    pub media: Vec<MediaMark>,
    /// Salt of the prefix. Requests with unequal salts share no page.
    pub salt: CacheSalt,
    /// True if the request may use pages that other requests computed. False if the request must compute every position
    /// itself, for example to return the prompt's logprobs.
    pub may_reuse: bool,
}

/// A media item among the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediaMark {
    /// The position of the item's first token.
    pub first: usize,
    /// Digest that identifies the item's data.
    pub digest: [u8; 16],
}

impl Content {
    /// The content of block `index`: the tokens of the block, then the position and digest of each media item that
    /// begins inside the block, then the salt if the block is the first. A block's identity includes the blocks before
    /// it, so the first block's salt holds for all. The content of a block with media or a salt has more than
    /// `page_tokens` elements: 5 for each item and 4 for a salt. So it equals only content with as many items and as
    /// many salts.
    pub(crate) fn block(&self, index: usize, page_tokens: usize) -> Cow<'_, [u32]> {
        let positions = index * page_tokens..(index + 1) * page_tokens;
        let tokens = self.tokens.at(positions.clone());
        let from = self.media.partition_point(|mark| mark.first < positions.start);
        let to = self.media.partition_point(|mark| mark.first < positions.end);
        let salt = if index == 0 { self.salt } else { CacheSalt::default() };
        if from == to && salt == CacheSalt::default() {
            return tokens;
        }
        let mut block = tokens.into_owned();
        for mark in &self.media[from..to] {
            block.push(mark.first as u32);
            block.extend(mark.digest.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)));
        }
        block.extend(salt.words());
        Cow::Owned(block)
    }
}

/// A segment of a prefill: `tokens` tokens under one walk. The walk's kind determines where the segment may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The segment's walk, which must be chunkable or atomic.
    pub walk: WalkId,
    /// Number of tokens, at least 1.
    pub tokens: usize,
}

impl GraphLaunch {
    /// Number of tokens of the prefill, including output of earlier incarnations.
    pub fn prefill_tokens(&self) -> usize {
        self.prefill.iter().map(|segment| segment.tokens).sum()
    }

    /// Number of tokens of the prompt, without output of earlier incarnations.
    pub fn prompt_tokens(&self) -> usize {
        self.prefill_tokens().saturating_sub(self.generated as usize)
    }

    /// Maximum number of tokens of the request, prompt and output together.
    pub fn max_total_tokens(&self) -> usize {
        self.prompt_tokens() + (self.stopping.max_tokens().max(self.generated)) as usize
    }
}

/// The reason for which a launch is refused on arrival, with the values that were compared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The prompt is empty, or one of its segments is empty.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The content and the prefill have different lengths.
    #[error("the content has {tokens} tokens, but the prefill {prefill}")]
    WrongContent {
        /// Number of tokens of the content.
        tokens: usize,
        /// Number of tokens of the prefill.
        prefill: usize,
    },
    /// The scheduler already holds a graph of this key.
    #[error("graph {0} is already here")]
    Duplicate(GraphKey),
    /// The walk is not declared, or its kind does not fit its use.
    #[error("walk {walk} cannot be run as {wanted}")]
    WrongWalk {
        /// The walk that the launch names.
        walk: WalkId,
        /// The kind of walk that is required.
        wanted: &'static str,
    },
    /// The request asks for more than one token, but names no walk that computes the tokens after the first.
    #[error("max_tokens is {max_tokens}, but the graph has no decode walk")]
    NoDecodeWalk {
        /// Maximum number of output tokens that the request asks for.
        max_tokens: u32,
    },
    /// Prompt plus output is longer than the model's context.
    #[error(
        "the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, but the context holds {max_context}"
    )]
    ContextTooSmall {
        /// Number of tokens of the prompt.
        prompt_tokens: usize,
        /// Maximum number of output tokens that the request asks for.
        max_tokens: u32,
        /// Maximum number of tokens of the model's context.
        max_context: usize,
    },
    /// The request needs more pages than the pool has.
    #[error("the request needs {needed} KV pages, but the pool has {total}")]
    PoolTooSmall {
        /// Number of pages for prompt plus output.
        needed: usize,
        /// Number of pages that requests can hold.
        total: usize,
    },
    /// The scheduler already holds its maximum number of requests.
    #[error("{held} requests are held, the limit is {limit}")]
    QueueFull {
        /// Number of requests held, running and waiting.
        held: usize,
        /// Maximum number of requests held, running and waiting.
        limit: usize,
    },
}
