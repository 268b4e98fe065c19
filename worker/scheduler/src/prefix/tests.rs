use super::*;

const START: Chain = Chain::Start;

#[test]
fn a_block_is_found_after_its_own_chain_only() {
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
fn a_block_after_a_forgotten_block_is_not_found_after_its_replacement() {
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

#[test]
fn a_forgotten_block_has_no_snapshot_even_if_its_page_holds_another_block() {
    let mut cache = PrefixCache::default();
    let first = cache.record(PageId(1), START, &[1, 2]).unwrap();
    cache.set_snapshot(PageId(1), SlotId(5));
    assert_eq!(cache.snapshot(first), Some(SlotId(5)));
    assert_eq!(cache.forget(PageId(1)), Some(SlotId(5)));
    let other = cache.record(PageId(1), START, &[3, 4]).unwrap();
    assert_eq!(cache.snapshot(first), None);
    assert_eq!(cache.snapshot(other), Some(SlotId::NULL));
}
