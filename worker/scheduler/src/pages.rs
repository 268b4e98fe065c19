//! Pages of the paged planes: a pool that counts references, and the block tables that hold them.
//!
//! A page is held (its count is above 0), idle (nobody holds it, but its content may be asked for again), or free. Idle
//! pages are as good as free ones: they are handed out when no free one is left, the one longest idle first.

use std::{collections::BTreeMap, sync::Arc};

use crate::prefix::{Chain, PrefixCache};

/// A page, by its place in the pool. The engine hands it to the device; the scheduler never looks inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

impl PageId {
    /// Where padding goes: belongs to the pool for ever, never stands in a block table.
    pub const NULL: Self = Self(0);
}

/// One request's pages in order of position: page `i` holds positions `i * page_tokens ..`.
///
/// A table holds one reference on each of its pages and gives it back once, because [`PagePool::release`] consumes the
/// table and nothing clones it.
#[derive(Debug)]
#[must_use = "a dropped table leaks its pages; give it to PagePool::release"]
pub struct BlockTable {
    pages: Arc<[PageId]>,
}

impl BlockTable {
    /// The pages, to put into a plan. A plan borrows what the table owns: the table outlives the step.
    pub fn pages(&self) -> Arc<[PageId]> {
        Arc::clone(&self.pages)
    }

    /// Whether `pages` are this very table's, as it stands now.
    pub(crate) fn is(&self, pages: &Arc<[PageId]>) -> bool {
        Arc::ptr_eq(&self.pages, pages)
    }

    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    /// Appends the pages of another table. Plans that were made before keep what they saw.
    pub(crate) fn extend(&mut self, more: Self) {
        self.pages = self.pages.iter().chain(more.pages.iter()).copied().collect();
    }
}

/// All pages of a worker.
#[derive(Debug)]
pub struct PagePool {
    page_tokens: usize,
    /// References on each page.
    ref_count: Vec<u32>,
    /// Used as a stack: the page freed last is likeliest to be in a cache.
    free: Vec<PageId>,
    /// Pages that nobody holds and whose content is known, by when they became idle.
    idle: BTreeMap<u64, PageId>,
    /// When each idle page became so.
    idle_since: Vec<u64>,
    /// Counts releases of pages.
    clock: u64,
    content: PrefixCache,
}

impl PagePool {
    /// A pool of `pages` pages, the null page included, each of `page_tokens` tokens.
    pub fn new(pages: usize, page_tokens: usize) -> Self {
        let mut ref_count = vec![0; pages];
        if let Some(null) = ref_count.first_mut() {
            *null = 1;
        }
        let free = (1..pages).rev().map(|page| PageId(page as u32)).collect();
        let (idle, idle_since, clock) = (BTreeMap::new(), vec![0; pages], 0);
        Self { page_tokens, ref_count, free, idle, idle_since, clock, content: PrefixCache::default() }
    }

    /// A table of `pages` fresh pages, or none if there are too few: never a part of them.
    pub fn allocate(&mut self, pages: usize) -> Option<BlockTable> {
        if pages > self.available() {
            return None;
        }
        for _ in self.free.len()..pages {
            let (_, page) = self.idle.pop_first()?;
            self.content.forget(page);
            self.free.push(page);
        }
        let first = self.free.len() - pages;
        // From the top of the stack, so that a young pool hands out pages in order.
        let taken: Arc<[PageId]> = self.free.drain(first..).rev().collect();
        for page in taken.iter() {
            self.ref_count[page.0 as usize] = 1;
        }
        Some(BlockTable { pages: taken })
    }

    /// The pages that hold these blocks from their start, as far as they are known, each with the chain that it ends.
    pub(crate) fn find<B: AsRef<[u32]>>(&self, blocks: impl IntoIterator<Item = B>) -> Vec<(PageId, Chain)> {
        let mut chain = Chain::Start;
        let known = |block: B| {
            let found = self.content.find(chain, block.as_ref())?;
            chain = found.1;
            Some(found)
        };
        blocks.into_iter().map_while(known).collect()
    }

    /// A table of `pages` pages that begins with `known` ones; none if there are too few. Whoever shares pages only
    /// reads them.
    pub(crate) fn allocate_behind(&mut self, known: &[(PageId, Chain)], pages: usize) -> Option<BlockTable> {
        // First of all, or they could be handed out as fresh ones.
        for &(page, _) in known {
            self.hold(page);
        }
        let mut table = BlockTable { pages: known.iter().map(|&(page, _)| page).collect() };
        match self.allocate(pages - known.len()) {
            Some(fresh) => {
                table.extend(fresh);
                Some(table)
            }
            None => {
                self.release(table);
                None
            }
        }
    }

    fn hold(&mut self, page: PageId) {
        let place = page.0 as usize;
        if self.ref_count[place] == 0 {
            self.idle.remove(&self.idle_since[place]);
        }
        self.ref_count[place] += 1;
    }

    /// Records what the table's page at `place` holds, so that it can be shared. Gives the chain that ends with it; see
    /// [`PrefixCache::record`].
    pub(crate) fn record(
        &mut self,
        table: &BlockTable,
        place: usize,
        before: Chain,
        tokens: &[u32],
    ) -> Option<Chain> {
        self.content.record(table.pages[place], before, tokens)
    }

    /// Gives a table's references back; a page that nobody else holds is idle or free from then on.
    pub fn release(&mut self, table: BlockTable) {
        // From the end, so that of two blocks the later one is forgotten first.
        for &page in table.pages.iter().rev() {
            let place = page.0 as usize;
            let count = &mut self.ref_count[place];
            assert!(*count > 0 && page != PageId::NULL, "page {} freed twice", page.0);
            *count -= 1;
            if *count > 0 {
                continue;
            }
            if self.content.contains(page) {
                self.clock += 1;
                self.idle_since[place] = self.clock;
                self.idle.insert(self.clock, page);
            } else {
                self.free.push(page);
            }
        }
    }

    /// How many pages hold this many tokens.
    pub fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens)
    }

    /// Tokens a page.
    pub fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// Pages that requests can have: all but the null page.
    pub fn total(&self) -> usize {
        self.ref_count.len().saturating_sub(1)
    }

    /// Pages that nobody holds.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Those of them whose content is known.
    pub fn idle(&self) -> usize {
        self.idle.len()
    }

    /// Pages that somebody holds, shared ones counted once.
    pub fn used(&self) -> usize {
        self.total() - self.available()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Chain = Chain::Start;

    /// A table of one page that holds `tokens`.
    fn page_of(pool: &mut PagePool, tokens: &[u32]) -> BlockTable {
        let table = pool.allocate(1).unwrap();
        pool.record(&table, 0, START, tokens).unwrap();
        table
    }

    #[test]
    fn the_null_page_is_never_handed_out() {
        let mut pool = PagePool::new(4, 16);
        let table = pool.allocate(3).unwrap();
        assert_eq!(*table.pages(), [PageId(1), PageId(2), PageId(3)]);
        assert!(pool.allocate(1).is_none());
        pool.release(table);
        assert_eq!((pool.used(), pool.available()), (0, 3));
    }

    #[test]
    fn too_few_pages_give_none_and_take_none() {
        let mut pool = PagePool::new(4, 2);
        let table = page_of(&mut pool, &[1, 2]);
        pool.release(table);
        assert!(pool.allocate(4).is_none());
        let known = pool.find([[1, 2]]);
        assert!(pool.allocate_behind(&known, 4).is_none());
        assert_eq!((pool.available(), pool.idle()), (3, 1));
    }

    #[test]
    fn a_shared_page_is_idle_when_its_last_holder_lets_go() {
        let mut pool = PagePool::new(4, 2);
        let first = page_of(&mut pool, &[1, 2]);
        let known = pool.find([[1, 2]]);
        let second = pool.allocate_behind(&known, 2).unwrap();
        assert_eq!((second.pages()[0], pool.used()), (first.pages()[0], 2));
        pool.release(first);
        assert_eq!((pool.used(), pool.idle()), (2, 0), "the second one still reads it");
        pool.release(second);
        assert_eq!((pool.used(), pool.idle()), (0, 1));
    }

    #[test]
    fn the_page_longest_idle_is_handed_out_first_and_then_not_found() {
        let mut pool = PagePool::new(4, 2);
        let tables = [[1, 1], [2, 2], [3, 3]].map(|tokens| page_of(&mut pool, &tokens));
        for table in tables {
            pool.release(table);
        }
        let known = pool.find([[1, 1]]);
        let again = pool.allocate_behind(&known, 1).unwrap();
        pool.release(again); // now the youngest
        let fresh = pool.allocate(1).unwrap();
        assert_eq!(*fresh.pages(), [PageId(2)]);
        assert_eq!(pool.find([[2, 2]]), []);
        assert_eq!(pool.find([[1, 1]]).len(), 1);
        pool.release(fresh);
    }
}
