//! Pages found by their content, so that the common start of two prompts is computed once.
//!
//! A block is the content of a full page: its tokens, and the media that begin among them. A block is identified by its
//! content and by the block before it, back to position 0, so that equal identities mean equal keys and values. A hash
//! only finds a candidate: a block is used only if its tokens and the block before it are found equal, too.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use crate::pages::PageId;

/// A sequence of blocks from position 0 on, identified by its last block. Equal chains mean equal content from position
/// 0 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Chain {
    /// No block.
    Start,
    /// The chain that ends with the block of this number. Numbers are never reused.
    Block(u64),
}

#[derive(Debug)]
struct Block {
    number: u64,
    before: Chain,
    tokens: Box<[u32]>,
}

/// An index of pages by content. Whether a page is held is recorded in the pool, not here.
#[derive(Debug, Default)]
pub(crate) struct PrefixCache {
    pages: HashMap<u64, PageId>,
    /// For each page in `pages`, the block that the page holds.
    blocks: HashMap<PageId, Block>,
    next_number: u64,
}

/// A hash with fixed keys (SipHash), so that equal calls to the scheduler give equal plans.
fn hash(before: Chain, tokens: &[u32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (before, tokens).hash(&mut hasher);
    hasher.finish()
}

impl PrefixCache {
    /// Finds the page whose block has these tokens and follows the chain `before`. Also returns the chain that ends
    /// with that block.
    pub fn find(&self, before: Chain, tokens: &[u32]) -> Option<(PageId, Chain)> {
        let page = *self.pages.get(&hash(before, tokens))?;
        let block = self.blocks.get(&page)?;
        (block.before == before && *block.tokens == *tokens).then_some((page, Chain::Block(block.number)))
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
        self.blocks.insert(page, Block { number, before, tokens: tokens.into() });
        Some(Chain::Block(number))
    }

    /// True if the page's content is recorded.
    pub fn contains(&self, page: PageId) -> bool {
        self.blocks.contains_key(&page)
    }

    /// Removes the record of the page's content. Called before the page is used for other content.
    pub fn forget(&mut self, page: PageId) {
        if let Some(block) = self.blocks.remove(&page) {
            self.pages.remove(&hash(block.before, &block.tokens));
        }
    }
}

#[cfg(test)]
mod tests;
