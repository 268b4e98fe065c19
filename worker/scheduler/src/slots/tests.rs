use super::*;

const PAGE: PageId = PageId(7);

/// Takes a slot and makes it a snapshot of `page`.
fn snapshot(pool: &mut SlotPool, page: u32) -> SlotId {
    let (slot, _) = pool.take().unwrap();
    pool.attach(slot, PageId(page));
    slot
}

#[test]
fn the_null_slot_is_never_taken_and_slots_come_in_order() {
    let mut pool = SlotPool::new(3);
    assert_eq!(pool.take(), Some((SlotId(1), None)));
    assert_eq!(pool.take(), Some((SlotId(2), None)));
    assert_eq!((pool.take(), pool.total()), (None, 2));
    pool.give_back(SlotId(1));
    assert_eq!(pool.take(), Some((SlotId(1), None)));
}

#[test]
fn the_snapshot_unused_for_longest_is_taken_once_no_slot_is_free() {
    let mut pool = SlotPool::new(5);
    let [first, second, third] = [7, 8, 9].map(|page| snapshot(&mut pool, page));
    pool.add_reader(first);
    pool.remove_reader(first);
    assert_eq!(pool.take(), Some((SlotId(4), None)));
    assert_eq!(pool.take(), Some((second, Some(PageId(8)))));
    assert_eq!(pool.take(), Some((third, Some(PageId(9)))));
    assert_eq!(pool.take(), Some((first, Some(PAGE))));
}

#[test]
fn a_snapshot_with_a_reader_is_never_taken() {
    let mut pool = SlotPool::new(2);
    let slot = snapshot(&mut pool, 7);
    pool.add_reader(slot);
    pool.add_reader(slot);
    pool.remove_reader(slot);
    assert_eq!((pool.take(), pool.available(), pool.idle()), (None, 0, 0));
    pool.remove_reader(slot);
    assert_eq!((pool.available(), pool.idle()), (1, 1));
    pool.drop_snapshot(slot);
    assert_eq!((pool.available(), pool.idle()), (1, 0));
    assert_eq!(pool.take(), Some((slot, None)));
}

#[test]
#[should_panic(expected = "not held")]
fn a_slot_is_given_back_once() {
    let mut pool = SlotPool::new(2);
    let (slot, _) = pool.take().unwrap();
    pool.give_back(slot);
    pool.give_back(slot);
}
