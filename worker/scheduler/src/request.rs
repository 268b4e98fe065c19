//! A request on its way through the scheduler: waiting, then running, then ended.
//!
//! Each state is a type and each transition consumes the state before, so a request is in one state and ends once. A
//! running request that is preempted waits again, and all tokens that it had computed and sampled are then its prefill.

mod running;

use std::time::Duration;

use tutti_proto::{Epoch, GraphKey, declaration::WalkId};
use tutti_settings::Admission;

pub(crate) use self::running::{Phase, Running};
use crate::{
    admission::Needs,
    launch::{Content, GraphRole},
    least_time::LeastTime,
    pages::{BlockTable, PagePool},
    prefix::Chain,
    step::{Ending, Outcome},
    stopping::{Finish, Stopping},
};

/// A request's position in the one order that every policy follows: requests are admitted and served from its start,
/// and preempted from its end. The position never changes, so the first request stays first until it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket {
    /// The step at which the request arrived, less the head start of its priority.
    pub came: i64,
    /// Order among requests of the same step.
    pub number: u64,
}

/// The positions at which a prefill may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    Anywhere,
    /// The prefill may begin anywhere, as behind a cached prefix, and then runs to its end.
    BeforeOnly,
    Nowhere,
}

/// A segment of a prefill. It begins where the segment before it ends.
#[derive(Clone, Debug)]
pub(crate) struct PrefillSegment {
    pub walk: WalkId,
    pub cut: Cut,
    /// The position after the segment's last.
    pub end: usize,
}

/// The state that a request keeps while it waits and runs.
#[derive(Debug)]
pub(crate) struct Request {
    pub key: GraphKey,
    /// The phases that run here. Becomes [`GraphRole::Whole`] once another worker's prefill has been imported.
    pub role: GraphRole,
    /// True while the request waits for embeddings of its media; it then waits for nothing else.
    pub awaits_media: bool,
    /// True if the request never gives up a page: its planes were imported and have media, which cannot be encoded
    /// here.
    pub is_pinned: bool,
    /// Ascending by `end`, without gaps from position 0; at least one segment. Fixed while the request runs.
    pub prefill: Vec<PrefillSegment>,
    /// The walk that computes sampled tokens again.
    pub recompute: (WalkId, Cut),
    pub prompt_tokens: usize,
    pub decode: Option<WalkId>,
    pub generated: u32,
    pub stopping: Stopping,
    /// Needs over the whole life.
    pub life: Needs,
    pub epoch: Epoch,
    /// Content of all positions so far. None if the request shares no pages.
    pub content: Option<Content>,
    /// True if logits of every position are wanted, which takes time of its own.
    pub is_scored: bool,
    /// Prompt tokens found in the prefix cache. Set when the request first runs.
    pub cached_tokens: Option<usize>,
    /// The most prefill tokens that the prefix cache has been seen to hold.
    pub known_tokens: usize,
    pub deadline: Option<Duration>,
}

/// Pages that a request begins to run with.
#[derive(Debug)]
pub(crate) struct AdmittedPages {
    table: BlockTable,
    /// Number of pages, from the first on, that come from the prefix cache.
    shared: usize,
    /// The chain that those pages end. None if the request shares no pages.
    chain: Option<Chain>,
}

impl Request {
    /// Ends a waiting request. It holds nothing, so no pool is needed.
    pub fn end(self, outcome: Outcome) -> Ending {
        Ending { key: self.key, passes: self.epoch, cached_tokens: self.cached_tokens(), outcome }
    }

    fn cached_tokens(&self) -> u32 {
        self.cached_tokens.unwrap_or(0) as u32
    }

    /// The resources that must be available before the request runs.
    pub fn needs(&self, admission: Admission, pool: &PagePool) -> Needs {
        let admission = if self.is_pinned { Admission::WholeLife } else { admission };
        self.life.to_run(admission, self.prefill_end(), pool)
    }

    /// Takes `pages` pages, as many of them as possible from the prefix cache. None if too few are available.
    pub fn take_pages(&self, pages: usize, pool: &mut PagePool) -> Option<AdmittedPages> {
        let Some(content) = &self.content else {
            return Some(AdmittedPages { table: pool.allocate(pages)?, shared: 0, chain: None });
        };
        let computed_here = self.role != GraphRole::Decode;
        // At least one position is always computed, here or elsewhere, since a token is sampled from it.
        let most = if content.may_reuse || !computed_here { self.prefill_end() - 1 } else { 0 };
        let mut known = pool.find(content.blocks(most, pool.page_tokens()));
        if computed_here {
            known.truncate(self.blocks_to_resume_behind(known.len(), pool.page_tokens()));
        }
        let chain = known.last().map_or(Chain::Start, |&(_, chain)| chain);
        let table = pool.allocate_behind(&known, pages)?;
        Some(AdmittedPages { table, shared: known.len(), chain: Some(chain) })
    }

    /// Looks up how much of the prefill is in the prefix cache. False if the request may not use the cache.
    pub fn look_up(&mut self, pool: &PagePool) -> bool {
        let Some(content) = self.content.as_ref().filter(|content| content.may_reuse) else { return false };
        let most = self.prefill_end() - 1;
        let known = pool.find(content.blocks(most, pool.page_tokens())).len();
        self.known_tokens = self.known_tokens.max(known * pool.page_tokens());
        true
    }

    /// The least time that the prefill takes from position `from` on, if segments that may be cut run in chunks of at
    /// most `chunk` tokens.
    pub fn least_time(&self, from: usize, chunk: usize, known: &LeastTime) -> Duration {
        let left = self.prefill.iter().scan(from, |start, segment| {
            let tokens = segment.end.saturating_sub(*start);
            *start += tokens;
            let most = if segment.cut == Cut::Anywhere { chunk } else { usize::MAX };
            Some(known.of(segment.walk, tokens, most))
        });
        left.sum()
    }

    /// The most of `blocks` blocks that end at a position where the prefill may begin.
    fn blocks_to_resume_behind(&self, blocks: usize, page_tokens: usize) -> usize {
        let mut resume = blocks * page_tokens;
        for index in (0..self.prefill.len()).rev().filter(|&index| self.prefill[index].cut == Cut::Nowhere) {
            let start = index.checked_sub(1).map_or(0, |before| self.prefill[before].end);
            if (start + 1..self.prefill[index].end).contains(&resume) {
                resume = start / page_tokens * page_tokens;
            }
        }
        resume / page_tokens
    }

    pub fn prefill_end(&self) -> usize {
        self.prefill.last().map_or(0, |segment| segment.end)
    }

    fn wants_output(&self, generated: u32) -> bool {
        generated < self.stopping.max_tokens()
    }

    fn finished(&self, reason: Finish) -> Outcome {
        Outcome::Finished { reason, generated: self.generated }
    }
}
