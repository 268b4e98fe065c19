//! Which prompts went to which workers, and so what their prefix caches are likely to have.
//!
//! It is what was sent and not what is cached: a worker that has had to make room has less. Being wrong costs a better
//! place, nothing else. A worker that comes back has another id, and nothing of what it had before.

use std::time::{Duration, Instant};

use tutti_proto::{WorkerId, cluster::v1 as pb};
use tutti_runtime::prefix_index::{Holder, PrefixIndex, PromptPieces, block_tokens, bytes_of_block};

use crate::request::Request;

/// What the index may take at the most: room for 5 million tokens of short prompts, 15 million of long ones.
const MAX_BYTES: usize = 64 << 20;
/// A prefix that was not sent for so long is forgotten.
const MAX_AGE: Duration = Duration::from_secs(900);

/// See the module. Without an index where workers have no prefix cache.
#[derive(Debug, Default)]
pub struct Prefixes(Option<PrefixIndex>);

/// Blocks of one prompt, by the worker that has them.
#[derive(Debug, Default)]
pub struct Cached(Vec<(Holder, usize)>);

impl Cached {
    #[cfg(test)]
    pub fn of(held: &[(WorkerId, usize)]) -> Self {
        Self(held.iter().map(|(worker, blocks)| (holder_of(*worker), *blocks)).collect())
    }

    /// How many this worker has.
    pub fn at(&self, worker: WorkerId) -> u64 {
        let held = self.0.iter().find(|(holder, _)| *holder == holder_of(worker));
        held.map_or(0, |(_, blocks)| *blocks as u64)
    }
}

fn holder_of(worker: WorkerId) -> Holder {
    Holder(worker.0.into())
}

impl Prefixes {
    pub fn new(prefix_cache: bool) -> Self {
        Self(prefix_cache.then(|| PrefixIndex::new(MAX_BYTES, MAX_AGE)))
    }

    /// Workers have so many pages now. No more than these hold is worth to be remembered.
    pub fn bound(&mut self, pages: u64, model: &pb::ModelDescription) {
        if let Some(index) = &mut self.0 {
            let bytes = (pages as usize).saturating_mul(bytes_of_block(block_tokens(model)));
            index.bound(bytes.min(MAX_BYTES));
        }
    }

    /// Who has the beginning of this request's prompt.
    pub fn cached(&self, request: &Request, now: Instant) -> Cached {
        let prompt = &request.spec().prompt;
        Cached(self.0.as_ref().map_or_else(Vec::new, |index| index.held(request.pieces(), prompt, now)))
    }

    /// The request's prompt is being sent there.
    pub fn sent(&mut self, request: &Request, worker: WorkerId, now: Instant) {
        if let Some(index) = &mut self.0 {
            index.insert(request.pieces(), &request.spec().prompt, holder_of(worker), now);
        }
    }

    /// Pieces that it knows, and the bytes that these take.
    pub fn size(&self) -> (usize, usize) {
        self.0.as_ref().map_or((0, 0), |index| (index.entries(), index.bytes()))
    }
}

/// Cuts a prompt, which takes a while where it is long: not to be done under a lock. Where there is nothing to choose, it
/// is of no use.
pub fn cut(prompt: &[u32], model: &pb::ModelDescription, useful: bool) -> PromptPieces {
    let block_tokens = block_tokens(model);
    if useful {
        PromptPieces::new(prompt, block_tokens)
    } else {
        PromptPieces::uncut(prompt.len(), block_tokens)
    }
}
