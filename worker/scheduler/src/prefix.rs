//! Pages found by their content, so that the common start of two prompts is computed once.
//!
//! A block is the content of a full page: its tokens, and the media that begin among them. A block is identified by its
//! content and by the block before it, back to position 0, so that equal identities mean equal keys and values. A hash
//! only finds a candidate block. The candidate is used only if its content and the block before it are equal, too.

use std::{
    borrow::Cow,
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use tutti_planes::{PageId, SlotId};

/// A sequence of blocks from position 0 on, identified by its last block. Equal chains mean equal content from position
/// 0 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chain {
    /// The chain without blocks.
    Start,
    /// The chain that ends with a recorded block.
    Block {
        /// The block's number. Numbers are never reused.
        number: u64,
        /// The page that the block was recorded in. The page may hold other content by now.
        page: PageId,
        /// Number of blocks of the chain.
        blocks: u32,
    },
}

impl Chain {
    /// A number that identifies the chain.
    fn number(self) -> u64 {
        match self {
            Self::Start => 0,
            Self::Block { number, .. } => number + 1,
        }
    }

    fn blocks(self) -> u32 {
        match self {
            Self::Start => 0,
            Self::Block { blocks, .. } => blocks,
        }
    }
}

#[derive(Debug)]
struct Block {
    number: u64,
    before: Chain,
    tokens: Box<[u32]>,
    /// The slot with the state behind this block. The null slot if there is none.
    snapshot: SlotId,
}

/// An index of pages by content. The pool, not the index, records which pages are held.
#[derive(Debug, Default)]
pub(crate) struct PrefixCache {
    pages: HashMap<u64, PageId>,
    /// For each page in `pages`, the block that the page holds.
    blocks: HashMap<PageId, Block>,
    next_number: u64,
    kept: KeptLookUp,
}

/// A look-up of a waiting request's prompt, kept from one plan to the next. Without it, each plan would hash the whole
/// prompt of the first waiting request again for as long as the request waits for pages.
#[derive(Debug, Default)]
struct KeptLookUp {
    /// Serial number of the waiting request.
    number: u64,
    /// The blocks that were found. All of them are still recorded.
    known: Vec<(PageId, Chain)>,
}

/// A hash with fixed keys (SipHash), so that equal calls to the scheduler give equal plans.
fn hash(before: Chain, tokens: &[u32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (before.number(), tokens).hash(&mut hasher);
    hasher.finish()
}

/// Hash of a prompt's first block.
pub(crate) fn hash_of_first(tokens: &[u32]) -> u64 {
    hash(Chain::Start, tokens)
}

impl PrefixCache {
    /// Looks up the first `blocks` blocks of a prompt, up to the first block that is not recorded. `block` gives the
    /// content of a block by its index. Returns each block's page with the chain that ends with the block. `known` has
    /// the blocks that a [kept look-up](Self::take_kept) has found already, or is empty. The search continues behind
    /// these blocks.
    pub fn look_up<'a>(
        &self,
        mut known: Vec<(PageId, Chain)>,
        blocks: usize,
        block: impl Fn(usize) -> Cow<'a, [u32]>,
    ) -> Vec<(PageId, Chain)> {
        known.truncate(blocks);
        while known.len() < blocks {
            let before = known.last().map_or(Chain::Start, |&(_, chain)| chain);
            let Some(found) = self.find(before, &block(known.len())) else { break };
            known.push(found);
        }
        known
    }

    /// Keeps the look-up of a waiting request's prompt. `number` identifies the request.
    pub fn keep(&mut self, number: u64, known: Vec<(PageId, Chain)>) {
        self.kept = KeptLookUp { number, known };
    }

    /// Takes the kept look-up. Empty if it is of another request.
    pub fn take_kept(&mut self, number: u64) -> Vec<(PageId, Chain)> {
        let kept = std::mem::take(&mut self.kept);
        if kept.number == number { kept.known } else { Vec::new() }
    }

    /// Finds the page whose block has these tokens and follows the chain `before`. Also returns the chain that ends
    /// with that block.
    pub fn find(&self, before: Chain, tokens: &[u32]) -> Option<(PageId, Chain)> {
        let page = *self.pages.get(&hash(before, tokens))?;
        let block = self.blocks.get(&page)?;
        let chain = Chain::Block { number: block.number, page, blocks: before.blocks() + 1 };
        (block.before == before && *block.tokens == *tokens).then_some((page, chain))
    }

    /// Records a page's content, unless another page is recorded with the same content. Returns the chain that ends
    /// with this content. None if other content has the same hash; later blocks of the chain can then not be recorded
    /// either.
    pub fn record(&mut self, page: PageId, before: Chain, tokens: &[u32]) -> Option<Chain> {
        if let Some((_, chain)) = self.find(before, tokens) {
            return Some(chain);
        }
        let hash = hash(before, tokens);
        if self.pages.contains_key(&hash) {
            return None;
        }
        let number = self.next_number;
        self.next_number += 1;
        self.pages.insert(hash, page);
        let block = Block { number, before, tokens: tokens.into(), snapshot: SlotId::NULL };
        self.blocks.insert(page, block);
        Some(Chain::Block { number, page, blocks: before.blocks() + 1 })
    }

    /// True if the page's content is recorded.
    pub fn contains(&self, page: PageId) -> bool {
        self.blocks.contains_key(&page)
    }

    /// Removes the record of the page's content. Called before the page is used for other content. Returns the slot
    /// with the state behind the block, which is the null slot if there is none. None if no content was recorded.
    pub fn forget(&mut self, page: PageId) -> Option<SlotId> {
        let block = self.blocks.remove(&page)?;
        self.pages.remove(&hash(block.before, &block.tokens));
        let index = block.before.blocks() as usize;
        if self.kept.known.get(index).is_some_and(|known| known.0 == page) {
            self.kept.known.truncate(index);
        }
        Some(block.snapshot)
    }

    /// The snapshot of the chain's last block: the null slot if it has none, None if the block is not recorded.
    pub fn snapshot(&self, chain: Chain) -> Option<SlotId> {
        let Chain::Block { number, page, .. } = chain else { return None };
        self.blocks.get(&page).filter(|block| block.number == number).map(|block| block.snapshot)
    }

    /// Sets the snapshot of the block that the page holds.
    pub fn set_snapshot(&mut self, page: PageId, snapshot: SlotId) {
        if let Some(block) = self.blocks.get_mut(&page) {
            block.snapshot = snapshot;
        }
    }
}

#[cfg(test)]
mod tests;
