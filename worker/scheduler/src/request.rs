//! The states of a request in the scheduler: waiting, running, ended.
//!
//! Each state is a type and each transition consumes the state before, so a request is in one state at a time and ends
//! once. A running request that is preempted waits again. Its prefill then covers all its tokens so far, prompt and
//! output.

mod running;

use std::time::Duration;

use tutti_planes::{PageId, SlotId};
use tutti_proto::{Epoch, GraphKey, declaration::WalkId};
use tutti_settings::Admission;

pub(crate) use self::running::{Draining, Phase, Running};
use crate::{
    admission::Needs,
    following::Following,
    holding::{Holding, PlanePool},
    launch::{Content, GraphRole},
    least_time::LeastTime,
    pages::PagePool,
    prefix::Chain,
    shares::ShareId,
    step::{Ending, Outcome},
    stopping::{Finish, Stopping},
};

/// The positions at which a segment of a prefill may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    Anywhere,
    /// The segment's computation may begin at any of its positions, for example behind a cached prefix. It then runs to
    /// the segment's end in one chunk.
    BeforeOnly,
    Nowhere,
}

/// A segment of a prefill. It begins where the segment before it ends.
#[derive(Clone, Debug)]
pub(crate) struct PrefillSegment {
    pub walk: WalkId,
    pub cut: Cut,
    /// One more than the segment's last position.
    pub end: usize,
}

/// The data that a request keeps both while it waits and while it runs.
#[derive(Debug)]
pub(crate) struct Request {
    pub key: GraphKey,
    /// The share that the request counts against.
    pub share: ShareId,
    /// The phases that this worker runs. Becomes [`GraphRole::Whole`] once another worker's prefill has been imported.
    pub role: GraphRole,
    /// True while the request waits for embeddings of its media. The request waits for pages only after the embeddings
    /// have arrived.
    pub awaits_media: bool,
    /// True if the mask of each token depends on the token before it.
    pub is_masked: bool,
    /// True if a row may be planned whose mask depends on a token of a row in flight. Never true without masks.
    pub runs_ahead: bool,
    /// True while the request is left out of steps because the mask of its next token is not ready. A request whose
    /// first mask is not ready waits for pages only afterwards.
    pub awaits_mask: bool,
    /// True if the request is never preempted. This holds if another worker computes its prefill and the prefill has
    /// media, because this worker could not encode the media again.
    pub is_pinned: bool,
    /// True once the request has yielded to another share. A request yields at most once.
    pub has_yielded: bool,
    /// At least one segment, ascending by `end`, without gaps from position 0. Fixed while the request runs.
    pub prefill: Vec<PrefillSegment>,
    /// The walk that computes sampled tokens again after a preemption, and the positions at which that walk's prefill
    /// may be cut.
    pub recompute: (WalkId, Cut),
    pub prompt_tokens: usize,
    pub decode: Option<WalkId>,
    pub generated: u32,
    pub stopping: Stopping,
    /// Resources that the request needs over its whole life.
    pub life: Needs,
    pub epoch: Epoch,
    /// Content of all positions so far. None if the request shares no pages.
    pub content: Option<Content>,
    /// Hash of the first block, by which requests with an equal start are found. None if the request shares no pages.
    pub first_block: Option<u64>,
    /// The request's relation to a running request that computes the same first blocks.
    pub following: Following,
    /// True if logits of every prefill position are wanted. Computing them takes extra time.
    pub is_scored: bool,
    /// Number of prompt tokens found in the prefix cache. None until the request first runs.
    pub cached_tokens: Option<usize>,
    /// Largest number of the prefill's tokens that a lookup has found in the prefix cache.
    pub known_tokens: usize,
    pub deadline: Option<Duration>,
}

/// The planes with which a request begins to run.
#[derive(Debug)]
pub(crate) struct Admitted {
    holding: Holding,
    /// The first `shared` pages of the holding come from the prefix cache.
    shared: usize,
    /// The chain of blocks in the shared pages. None if the request has no content by which pages could be shared.
    chain: Option<Chain>,
    /// The slot to copy to the request's slot before its first row: a snapshot, or the null slot for the initial
    /// state. None if nothing is to be copied.
    initial: Option<SlotId>,
}

impl Request {
    /// Ends a request that holds no planes, so no pool is needed.
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

    /// Takes a slot and `pages` pages, as many of them as possible from the prefix cache. `number` identifies the
    /// request. None if too few pages or slots are available.
    pub fn take_planes(&self, number: u64, pages: usize, pool: &mut PlanePool) -> Option<Admitted> {
        // A request starts from the null slot's state, with two exceptions: with [`GraphRole::Decode`], the prefill's
        // worker sends the state, and an encoder's graph has no state.
        let has_initial = pool.has_slots() && !matches!(self.role, GraphRole::Decode | GraphRole::Encode);
        let initial = has_initial.then_some(SlotId::NULL);
        let Some(content) = &self.content else {
            let holding = pool.take(&[], pages, None)?;
            return Some(Admitted { holding, shared: 0, chain: None, initial });
        };
        let computed_here = self.role != GraphRole::Decode;
        // The last position never comes from the cache: this or another worker must compute it, since the first token
        // is sampled from it.
        let most = if content.may_reuse || !computed_here { self.prefill_end() - 1 } else { 0 };
        let page_tokens = pool.pages().page_tokens();
        let kept = pool.content_mut().take_kept(number);
        let block = |index| content.block(index, page_tokens);
        let known = pool.pages().content().look_up(kept, most / page_tokens, block);
        if pages > known.len() + pool.pages().available() {
            pool.content_mut().keep(number, known);
            return None;
        }
        let (shared, snapshot) = match (computed_here, has_initial) {
            (false, _) => (known.len(), None),
            (true, false) => (self.blocks_to_resume_behind(known.len(), page_tokens), None),
            (true, true) => self.last_snapshot(&known, pool),
        };
        let Some(holding) = pool.take(&known[..shared], pages, snapshot) else {
            pool.content_mut().keep(number, known);
            return None;
        };
        let chain = known[..shared].last().map_or(Chain::Start, |&(_, chain)| chain);
        Some(Admitted { holding, shared, chain: Some(chain), initial: snapshot.or(initial) })
    }

    /// Finds the last known block that has a snapshot and behind which the prefill may resume. Returns the number of
    /// blocks up to and including that block, and its snapshot. Returns 0 and None if there is no such block.
    fn last_snapshot(&self, known: &[(PageId, Chain)], pool: &PlanePool) -> (usize, Option<SlotId>) {
        let page_tokens = pool.pages().page_tokens();
        let snapshot = |blocks: usize| {
            let slot = pool.snapshot(known[blocks - 1].1);
            let found = slot != SlotId::NULL && self.blocks_to_resume_behind(blocks, page_tokens) == blocks;
            found.then_some((blocks, Some(slot)))
        };
        (1..=known.len()).rev().find_map(snapshot).unwrap_or((0, None))
    }

    /// Number of leading blocks that the prefill would skip if the request began to run now.
    pub fn blocks_to_skip(&self, pool: &PlanePool) -> usize {
        let page_tokens = pool.pages().page_tokens();
        let Some(content) = &self.content else { return 0 };
        let (most, block) = (self.prefill_end() - 1, |index| content.block(index, page_tokens));
        let known = pool.pages().content().look_up(Vec::new(), most / page_tokens, block);
        match pool.has_slots() {
            true => self.last_snapshot(&known, pool).0,
            false => self.blocks_to_resume_behind(known.len(), page_tokens),
        }
    }

    /// Updates `known_tokens` from the prefix cache. False if the request may not use the cache.
    pub fn update_known_tokens(&mut self, pool: &PagePool) -> bool {
        let Some(content) = self.content.as_ref().filter(|content| content.may_reuse) else { return false };
        let (most, page_tokens) = (self.prefill_end() - 1, pool.page_tokens());
        let block = |index| content.block(index, page_tokens);
        let known = pool.content().look_up(Vec::new(), most / page_tokens, block).len();
        self.known_tokens = self.known_tokens.max(known * page_tokens);
        true
    }

    /// Lower bound on the time of the prefill from position `from` on. Segments that may be cut anywhere run in chunks
    /// of at most `chunk` tokens.
    pub fn least_time(&self, from: usize, chunk: usize, known: &LeastTime) -> Duration {
        let left = self.prefill.iter().scan(from, |start, segment| {
            let tokens = segment.end.saturating_sub(*start);
            *start += tokens;
            let most = if segment.cut == Cut::Anywhere { chunk } else { usize::MAX };
            Some(known.of(segment.walk, tokens, most))
        });
        left.sum()
    }

    /// Largest number of leading blocks, at most `blocks`, that the prefill may skip. The skipped blocks never end
    /// inside a segment that must not be cut.
    pub fn blocks_to_resume_behind(&self, blocks: usize, page_tokens: usize) -> usize {
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

    pub fn finished(&self, reason: Finish) -> Outcome {
        Outcome::Finished { reason, generated: self.generated }
    }
}
