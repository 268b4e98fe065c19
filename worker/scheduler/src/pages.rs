//! Pages of the paged planes: a pool that counts references, and the block tables that hold them.

use std::sync::Arc;

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
}

/// All pages of a worker.
#[derive(Debug)]
pub struct PagePool {
    page_tokens: usize,
    /// References on each page; 0 exactly for those in `free`.
    ref_count: Vec<u32>,
    /// Used as a stack: the page freed last is likeliest to be in a cache.
    free: Vec<PageId>,
}

impl PagePool {
    /// A pool of `pages` pages, the null page included, each of `page_tokens` tokens.
    pub fn new(pages: usize, page_tokens: usize) -> Self {
        let mut ref_count = vec![0; pages];
        if let Some(null) = ref_count.first_mut() {
            *null = 1;
        }
        let free = (1..pages).rev().map(|page| PageId(page as u32)).collect();
        Self { page_tokens, ref_count, free }
    }

    /// A table of `pages` fresh pages, or none if there are too few: never a part of them.
    pub fn allocate(&mut self, pages: usize) -> Option<BlockTable> {
        let first = self.free.len().checked_sub(pages)?;
        // From the top of the stack, so that a young pool hands out pages in order.
        let taken: Arc<[PageId]> = self.free.drain(first..).rev().collect();
        for page in taken.iter() {
            self.ref_count[page.0 as usize] = 1;
        }
        Some(BlockTable { pages: taken })
    }

    /// A second table over the first `pages` pages of `table`. Whoever shares pages only reads them.
    pub fn share(&mut self, table: &BlockTable, pages: usize) -> BlockTable {
        let pages: Arc<[PageId]> = table.pages[..pages].into();
        for page in pages.iter() {
            self.ref_count[page.0 as usize] += 1;
        }
        BlockTable { pages }
    }

    /// Gives a table's references back; pages that nobody else holds are free again.
    pub fn release(&mut self, table: BlockTable) {
        for &page in table.pages.iter().rev() {
            let count = &mut self.ref_count[page.0 as usize];
            assert!(*count > 0 && page != PageId::NULL, "page {} freed twice", page.0);
            *count -= 1;
            if *count == 0 {
                self.free.push(page);
            }
        }
    }

    /// How many pages hold this many tokens.
    pub fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens)
    }

    /// Pages that requests can have: all but the null page.
    pub fn total(&self) -> usize {
        self.ref_count.len().saturating_sub(1)
    }

    /// Pages that nobody holds.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Pages that somebody holds, shared ones counted once.
    pub fn used(&self) -> usize {
        self.total() - self.free()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_null_page_is_never_handed_out() {
        let mut pool = PagePool::new(4, 16);
        let table = pool.allocate(3).unwrap();
        assert_eq!(*table.pages(), [PageId(1), PageId(2), PageId(3)]);
        assert!(pool.allocate(1).is_none());
        pool.release(table);
        assert_eq!((pool.used(), pool.free()), (0, 3));
    }

    #[test]
    fn too_few_pages_give_none_and_take_none() {
        let mut pool = PagePool::new(4, 16);
        assert!(pool.allocate(4).is_none());
        assert_eq!(pool.free(), 3);
    }

    #[test]
    fn a_shared_page_is_free_when_its_last_holder_lets_go() {
        let mut pool = PagePool::new(4, 16);
        let whole = pool.allocate(2).unwrap();
        let prefix = pool.share(&whole, 1);
        pool.release(whole);
        assert_eq!(pool.used(), 1, "the shared page stays, the other is free");
        pool.release(prefix);
        assert_eq!(pool.used(), 0);
    }
}
