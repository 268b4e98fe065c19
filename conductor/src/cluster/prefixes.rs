//! An index of the prompts that each worker has received, which estimates the contents of the workers' prefix caches.
//!
//! The index records what was sent, not what is cached: a worker that had to make room has less in its cache. A wrong
//! estimate can only lead to a worse placement. A worker that joins again has a new id, under which the index holds
//! nothing.

use std::time::{Duration, Instant};

use tutti_proto::{RequestParts, WorkerId, cluster::v1 as pb};
use tutti_runtime::prefix_index::{
    Holder, IndexSize, PrefixIndex, PromptPieces, block_tokens, bytes_of_block,
};

use crate::request::Request;

/// Maximum bytes of the index. They hold about 5 million tokens of short prompts, or 15 million tokens of long prompts.
const MAX_BYTES: usize = 64 << 20;
/// Time after which the index drops a prefix that was not sent again.
const MAX_AGE: Duration = Duration::from_secs(900);

/// The index of prompts by worker. `None` if workers have no prefix cache.
#[derive(Debug, Default)]
pub struct Prefixes(Option<PrefixIndex>);

/// Number of leading blocks of one prompt that each worker is estimated to have cached.
#[derive(Debug, Default)]
pub struct Cached(Vec<(Holder, usize)>);

impl Cached {
    #[cfg(test)]
    pub fn of(held: &[(WorkerId, usize)]) -> Self {
        Self(held.iter().map(|(worker, blocks)| (holder_of(*worker), *blocks)).collect())
    }

    /// Number of leading blocks that this worker is estimated to have cached.
    pub fn at(&self, worker: WorkerId) -> u64 {
        let held = self.0.iter().find(|(holder, _)| *holder == holder_of(worker));
        held.map_or(0, |(_, blocks)| *blocks as u64)
    }
}

fn holder_of(worker: WorkerId) -> Holder {
    Holder(worker.0.into())
}

impl Prefixes {
    /// An empty index.
    pub fn indexed() -> Self {
        Self(Some(PrefixIndex::new(MAX_BYTES, MAX_AGE)))
    }

    /// Bounds the index by `pages`, the number of KV pages of all workers: prefixes beyond these pages cannot be
    /// cached.
    pub fn bound(&mut self, pages: u64, model: &pb::ModelDescription) {
        if let Some(index) = &mut self.0 {
            let bytes = (pages as usize).saturating_mul(bytes_of_block(block_tokens(model)));
            index.bound(bytes.min(MAX_BYTES));
        }
    }

    /// Returns how many leading blocks of this request's prompt each worker is estimated to have cached.
    pub fn cached(&self, request: &Request, now: Instant) -> Cached {
        let prompt = &request.spec().prompt;
        Cached(self.0.as_ref().map_or_else(Vec::new, |index| index.held(request.pieces(), prompt, now)))
    }

    /// Records that a request's prompt is sent to a worker.
    pub fn insert(&mut self, request: &Request, worker: WorkerId, now: Instant) {
        self.insert_held(request.pieces(), &request.spec().prompt, worker, now);
    }

    /// Records that a worker holds a prompt.
    pub fn insert_held(&mut self, pieces: &PromptPieces, prompt: &[u32], worker: WorkerId, now: Instant) {
        if let Some(index) = &mut self.0 {
            index.insert(pieces, prompt, holder_of(worker), now);
        }
    }

    pub fn size(&self) -> IndexSize {
        self.0.as_ref().map(PrefixIndex::size).unwrap_or_default()
    }
}

/// Cuts a request's prompt into pieces for the index. A long prompt takes long to cut, so callers must hold no lock.
pub fn cut(spec: &RequestParts, model: &pb::ModelDescription) -> PromptPieces {
    PromptPieces::new(&spec.prompt, spec.cache_salt, block_tokens(model))
}

/// Returns the size of a prompt without its pieces. Such a prompt is not indexed, because its placement cannot depend
/// on prefixes.
pub fn uncut(prompt: &[u32], model: &pb::ModelDescription) -> PromptPieces {
    PromptPieces::uncut(prompt.len(), block_tokens(model))
}
