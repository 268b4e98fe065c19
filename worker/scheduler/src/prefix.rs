//! Pages found by their content, so that a prompt that starts like an earlier one is not computed again.
//!
//! A full page is a block. Its name is its content (its tokens, and what media begin among them) and the block before it,
//! back to position 0, so equal names mean equal keys and values. Hashes only find a block; its tokens and its predecessor are compared before it is used.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use crate::pages::PageId;

/// All that stands before a block. Equal chains mean equal content from position 0 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Chain {
    /// Nothing.
    Start,
    /// The block of this number; a block that is forgotten takes its number with it.
    Block(u64),
}

#[derive(Debug)]
struct Block {
    number: u64,
    before: Chain,
    tokens: Box<[u32]>,
}

/// Which pages hold which content. Whether anybody uses them is the pool's to know.
#[derive(Debug, Default)]
pub(crate) struct PrefixCache {
    pages: HashMap<u64, PageId>,
    /// The content of each page in `pages`.
    blocks: HashMap<PageId, Block>,
    next_number: u64,
}

/// SipHash with fixed keys: what is planned stays a function of what the scheduler is told.
fn hash(before: Chain, tokens: &[u32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (before, tokens).hash(&mut hasher);
    hasher.finish()
}

impl PrefixCache {
    /// The page that holds these tokens behind that chain, and the chain that it ends.
    pub fn find(&self, before: Chain, tokens: &[u32]) -> Option<(PageId, Chain)> {
        let page = *self.pages.get(&hash(before, tokens))?;
        let block = self.blocks.get(&page)?;
        (block.before == before && *block.tokens == *tokens).then_some((page, Chain::Block(block.number)))
    }

    /// Records what a page holds, unless another page is known to hold the same. Gives the chain that ends with it; none
    /// if another content has its hash, and then nothing behind it can be found either.
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

    /// Whether the page's content is known.
    pub fn contains(&self, page: PageId) -> bool {
        self.blocks.contains_key(&page)
    }

    /// The page is about to hold something else.
    pub fn forget(&mut self, page: PageId) {
        if let Some(block) = self.blocks.remove(&page) {
            self.pages.remove(&hash(block.before, &block.tokens));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Chain = Chain::Start;

    #[test]
    fn a_block_is_found_behind_its_own_chain_only() {
        let mut cache = PrefixCache::default();
        let first = cache.record(PageId(1), START, &[1, 2]).unwrap();
        let second = cache.record(PageId(2), first, &[3, 4]).unwrap();
        assert_eq!(cache.find(START, &[1, 2]), Some((PageId(1), first)));
        assert_eq!(cache.find(first, &[3, 4]), Some((PageId(2), second)));
        assert_eq!(cache.find(START, &[3, 4]), None);
    }

    #[test]
    fn the_second_page_of_the_same_content_is_not_recorded() {
        let mut cache = PrefixCache::default();
        let first = cache.record(PageId(1), START, &[1, 2]);
        assert_eq!(cache.record(PageId(2), START, &[1, 2]), first);
        assert!(!cache.contains(PageId(2)));
    }

    #[test]
    fn what_stood_behind_a_forgotten_block_is_not_found_behind_its_successor() {
        let mut cache = PrefixCache::default();
        let first = cache.record(PageId(1), START, &[1, 2]).unwrap();
        let _ = cache.record(PageId(2), first, &[3, 4]);
        cache.forget(PageId(1));
        assert_eq!(cache.find(START, &[1, 2]), None);
        let again = cache.record(PageId(3), START, &[1, 2]).unwrap();
        assert_eq!(cache.find(again, &[3, 4]), None);
    }

    #[test]
    fn an_equal_hash_is_not_equal_content() {
        let mut cache = PrefixCache::default();
        let _ = cache.record(PageId(1), START, &[1, 2]);
        cache.blocks.get_mut(&PageId(1)).unwrap().tokens = [9, 9].into();
        assert_eq!(cache.find(START, &[1, 2]), None);
        assert_eq!(cache.record(PageId(2), START, &[1, 2]), None);
    }
}
