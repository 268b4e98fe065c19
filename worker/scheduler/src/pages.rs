//! Pages of the paged planes: a pool that counts references, and the block tables that hold pages.
//!
//! A page is held (its reference count is above 0), idle (not held, but its content can still be found), or free. Idle
//! pages count as available: when no free page is left, the page that has been idle longest is allocated.

use std::{collections::BTreeMap, sync::Arc};

use tutti_planes::{PageId, SlotId};

use crate::prefix::{Chain, PrefixCache};

/// One request's pages in order of position: page `i` holds positions from `i * page_tokens` on.
///
/// A table holds one reference on each of its pages and gives each reference back exactly once: [`PagePool::release`]
/// consumes the table, and tables cannot be cloned.
#[derive(Debug)]
#[must_use = "a dropped table leaks its pages; give it to PagePool::release"]
pub struct BlockTable {
    pages: Arc<[PageId]>,
}

impl BlockTable {
    /// The list of pages, for a plan. The plan's list holds no references of its own, because the table outlives the
    /// step.
    pub fn pages(&self) -> Arc<[PageId]> {
        Arc::clone(&self.pages)
    }

    /// True if `pages` is this table's current list of pages itself, not an equal copy.
    pub(crate) fn is(&self, pages: &Arc<[PageId]>) -> bool {
        Arc::ptr_eq(&self.pages, pages)
    }

    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    /// Appends the pages of another table. Earlier plans keep the list that they were given.
    pub(crate) fn extend(&mut self, more: Self) {
        self.pages = self.pages.iter().chain(more.pages.iter()).copied().collect();
    }
}

/// The pages of a worker.
#[derive(Debug)]
pub struct PagePool {
    page_tokens: usize,
    /// Number of references on each page, by the page's index.
    ref_count: Vec<u32>,
    /// The free pages, used as a stack. The page freed last is allocated first, because it is the likeliest to be in a
    /// CPU cache.
    free: Vec<PageId>,
    /// Idle pages, by the time at which they became idle.
    idle: BTreeMap<u64, PageId>,
    /// For each page, by its index, the time at which it last became idle: its key in `idle`.
    idle_since: Vec<u64>,
    /// Logical time: the number of times that a page has become idle.
    clock: u64,
    content: PrefixCache,
    /// Snapshots of evicted pages. Their slots are not freed yet.
    dropped_snapshots: Vec<SlotId>,
}

impl PagePool {
    /// A pool of `pages` pages, the null page included, with `page_tokens` tokens per page.
    pub fn new(pages: usize, page_tokens: usize) -> Self {
        let mut ref_count = vec![0; pages];
        if let Some(null) = ref_count.first_mut() {
            *null = 1;
        }
        let free = (1..pages).rev().map(|page| PageId(page as u32)).collect();
        let (idle, idle_since, clock) = (BTreeMap::new(), vec![0; pages], 0);
        Self {
            page_tokens,
            ref_count,
            free,
            idle,
            idle_since,
            clock,
            content: PrefixCache::default(),
            dropped_snapshots: Vec::new(),
        }
    }

    /// Allocates a table of `pages` fresh pages. If fewer pages are available, nothing changes and the result is None.
    pub fn allocate(&mut self, pages: usize) -> Option<BlockTable> {
        if pages > self.available() {
            return None;
        }
        for _ in self.free.len()..pages {
            let (_, page) = self.idle.pop_first()?;
            self.evict(page);
        }
        let first = self.free.len() - pages;
        // Pages are taken from the top of the stack, so that a new pool allocates pages in ascending order.
        let taken: Arc<[PageId]> = self.free.drain(first..).rev().collect();
        for page in taken.iter() {
            self.ref_count[page.0 as usize] = 1;
        }
        Some(BlockTable { pages: taken })
    }

    /// Frees an idle page and forgets its content.
    fn evict(&mut self, page: PageId) {
        let snapshot = self.content.forget(page);
        self.dropped_snapshots.extend(snapshot.filter(|&slot| slot != SlotId::NULL));
        self.free.push(page);
    }

    /// The index of pages by content.
    pub(crate) fn content(&self) -> &PrefixCache {
        &self.content
    }

    pub(crate) fn content_mut(&mut self) -> &mut PrefixCache {
        &mut self.content
    }

    /// True if [`allocate_behind`](Self::allocate_behind) would succeed.
    pub(crate) fn fits_behind(&self, known: &[(PageId, Chain)], pages: usize) -> bool {
        let fresh = pages - known.len();
        // Idle pages among the known ones count as available, but cannot be allocated as fresh pages.
        let idle = || known.iter().filter(|(page, _)| self.ref_count[page.0 as usize] == 0).count();
        fresh <= self.available() && fresh + idle() <= self.available()
    }

    /// The snapshot of the chain's last block. The null slot if there is none.
    pub(crate) fn snapshot(&self, chain: Chain) -> SlotId {
        self.content.snapshot(chain).unwrap_or(SlotId::NULL)
    }

    /// The page of the chain's last block, if the block is recorded and has no snapshot.
    pub(crate) fn page_without_snapshot(&self, chain: Chain) -> Option<PageId> {
        let Chain::Block { page, .. } = chain else { return None };
        (self.content.snapshot(chain) == Some(SlotId::NULL)).then_some(page)
    }

    /// Sets the snapshot of the block that the page holds.
    pub(crate) fn set_snapshot(&mut self, page: PageId, snapshot: SlotId) {
        self.content.set_snapshot(page, snapshot);
    }

    /// Takes the slot of a snapshot whose page was evicted. None if there is no such snapshot.
    pub(crate) fn next_dropped_snapshot(&mut self) -> Option<SlotId> {
        self.dropped_snapshots.pop()
    }

    /// Allocates a table of `pages` pages that begins with the `known` pages. The known pages are shared and only read.
    /// None if too few pages are available.
    pub(crate) fn allocate_behind(&mut self, known: &[(PageId, Chain)], pages: usize) -> Option<BlockTable> {
        // The known pages are held before any page is allocated. Otherwise idle ones among them could be allocated as
        // fresh pages.
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
        let index = page.0 as usize;
        if self.ref_count[index] == 0 {
            self.idle.remove(&self.idle_since[index]);
        }
        self.ref_count[index] += 1;
    }

    /// Records the content of the table's page at `index`, so that the page can be shared. Returns the chain that ends
    /// with the page's block; see [`PrefixCache::record`].
    pub(crate) fn record(
        &mut self,
        table: &BlockTable,
        index: usize,
        before: Chain,
        tokens: &[u32],
    ) -> Option<Chain> {
        self.content.record(table.pages[index], before, tokens)
    }

    /// Gives back a table's references. A page that loses its last reference becomes idle if the page's content is
    /// recorded, otherwise free.
    pub fn release(&mut self, table: BlockTable) {
        // The last page is released first, so that of two blocks of a chain the later one is evicted first.
        for &page in table.pages.iter().rev() {
            let index = page.0 as usize;
            let count = &mut self.ref_count[index];
            assert!(*count > 0 && page != PageId::NULL, "page {} freed twice", page.0);
            *count -= 1;
            if *count > 0 {
                continue;
            }
            if self.content.contains(page) {
                self.clock += 1;
                self.idle_since[index] = self.clock;
                self.idle.insert(self.clock, page);
            } else {
                self.free.push(page);
            }
        }
    }

    /// Number of pages that `tokens` tokens take.
    pub fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens)
    }

    /// Tokens per page.
    pub fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// Number of pages that requests can hold: all but the null page.
    pub fn total(&self) -> usize {
        self.ref_count.len().saturating_sub(1)
    }

    /// Number of pages that no request holds.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Number of idle pages: no request holds them, but their content can still be found.
    pub fn idle(&self) -> usize {
        self.idle.len()
    }

    /// Number of pages that requests hold. A shared page counts once.
    pub fn used(&self) -> usize {
        self.total() - self.available()
    }
}

#[cfg(test)]
mod tests;
