use std::borrow::Cow;

use super::*;

const START: Chain = Chain::Start;

/// A table of one page that holds `tokens`.
fn page_of(pool: &mut PagePool, tokens: &[u32]) -> BlockTable {
    let table = pool.allocate(1).unwrap();
    pool.record(&table, 0, START, tokens).unwrap();
    table
}

/// Looks up the page of a prompt of one block.
fn find(pool: &PagePool, tokens: [u32; 2]) -> Vec<(PageId, Chain)> {
    pool.content().look_up(Vec::new(), 1, |_| Cow::Owned(tokens.to_vec()))
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
    let known = find(&pool, [1, 2]);
    assert!(pool.allocate_behind(&known, 4).is_none());
    assert_eq!((pool.available(), pool.idle()), (3, 1));
}

#[test]
fn a_shared_page_is_idle_once_its_last_holder_releases_it() {
    let mut pool = PagePool::new(4, 2);
    let first = page_of(&mut pool, &[1, 2]);
    let known = find(&pool, [1, 2]);
    let second = pool.allocate_behind(&known, 2).unwrap();
    assert_eq!((second.pages()[0], pool.used()), (first.pages()[0], 2));
    pool.release(first);
    assert_eq!((pool.used(), pool.idle()), (2, 0), "the second table still reads it");
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
    let known = find(&pool, [1, 1]);
    let again = pool.allocate_behind(&known, 1).unwrap();
    pool.release(again); // now idle for the shortest time
    let fresh = pool.allocate(1).unwrap();
    assert_eq!(*fresh.pages(), [PageId(2)]);
    assert_eq!(find(&pool, [2, 2]), []);
    assert_eq!(find(&pool, [1, 1]).len(), 1);
    pool.release(fresh);
}

#[test]
fn a_kept_look_up_goes_on_where_it_ended_and_forgets_what_is_evicted() {
    let mut pool = PagePool::new(4, 2);
    let blocks = [[1, 1], [2, 2], [3, 3], [4, 4]];
    let looked_at = std::cell::RefCell::new(Vec::new());
    let look_up = |pool: &mut PagePool, number| {
        let block = |index: usize| {
            looked_at.borrow_mut().push(index);
            Cow::Owned(blocks[index].to_vec())
        };
        let kept = pool.content_mut().take_kept(number);
        let known = pool.content().look_up(kept, blocks.len(), block);
        let found = known.len();
        pool.content_mut().keep(number, known);
        (found, looked_at.take())
    };
    let table = pool.allocate(3).unwrap();
    let chains = blocks[..2].iter().enumerate().scan(START, |chain, (index, block)| {
        *chain = pool.record(&table, index, *chain, block).unwrap();
        Some(*chain)
    });
    let second = chains.last().unwrap();
    assert_eq!(look_up(&mut pool, 1), (2, vec![0, 1, 2]));
    assert_eq!(look_up(&mut pool, 1), (2, vec![2]), "only the block that was missing");
    let _ = pool.record(&table, 2, second, &blocks[2]);
    assert_eq!(look_up(&mut pool, 1), (3, vec![2, 3]));
    pool.release(table);
    let other = pool.allocate(1).unwrap();
    assert_eq!(look_up(&mut pool, 1), (2, vec![2]), "the last block's page is used for other content");
    assert_eq!(look_up(&mut pool, 2), (2, vec![0, 1, 2]), "another request");
    pool.release(other);
}

#[test]
fn known_pages_that_are_idle_are_not_counted_twice() {
    let mut pool = PagePool::new(5, 2);
    let table = page_of(&mut pool, &[1, 2]);
    let known = find(&pool, [1, 2]);
    assert!(pool.fits_behind(&known, 4), "held: three pages are free");
    pool.release(table);
    let taken = pool.allocate(1).unwrap();
    assert!(pool.fits_behind(&known, 3) && !pool.fits_behind(&known, 4));
    pool.release(taken);
}
