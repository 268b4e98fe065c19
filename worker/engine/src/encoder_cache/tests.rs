use super::*;

fn key(items: &[u8]) -> CallKey {
    let items = items.iter().map(|item| [*item; DIGEST_BYTES]).collect();
    CallKey { walk: WalkId(3), salt: CacheSalt::default(), items }
}

/// Looks up a call of one item, and keeps its embeddings if they were not there. True if they were.
fn call(cache: &mut EncoderCache, item: u8, values: usize) -> bool {
    let (key, values) = (key(&[item]), vec![f32::from(item); values]);
    match cache.find(Some(&key)) {
        Some(found) => {
            assert_eq!(found, values);
            true
        }
        None => {
            cache.keep(&key, &values);
            false
        }
    }
}

#[test]
fn a_call_is_found_by_its_walk_its_salt_and_all_its_items_in_order() {
    let mut cache = EncoderCache::new(1 << 20);
    cache.keep(&key(&[1, 2]), &[0.5]);
    let of = |change: fn(&mut CallKey)| {
        let mut other = key(&[1, 2]);
        change(&mut other);
        other
    };
    assert_eq!(cache.find(Some(&key(&[1, 2]))), Some(&[0.5][..]));
    for other in [
        key(&[1]),
        key(&[2, 1]),
        key(&[1, 3]),
        key(&[1, 2, 2]),
        of(|key| key.walk = WalkId(4)),
        of(|key| key.salt = CacheSalt::new([1; 16])),
    ] {
        assert_eq!(cache.find(Some(&other)), None, "{other:?}");
    }
    assert_eq!(cache.find(None), None);
    let EncoderCounts { hits, misses, .. } = cache.counts();
    assert_eq!((hits, misses), (1, 7));
}

#[test]
fn the_least_recently_used_makes_room_and_the_bytes_never_exceed_the_limit() {
    let entry = key(&[1]).bytes(10);
    let mut cache = EncoderCache::new(3 * entry);
    for item in [1, 2, 3] {
        assert!(!call(&mut cache, item, 10));
    }
    assert_eq!(cache.counts().bytes as usize, 3 * entry);
    assert!(call(&mut cache, 1, 10), "a use that makes item 2 the oldest");
    assert!(!call(&mut cache, 4, 10));
    assert!(call(&mut cache, 1, 10) && call(&mut cache, 3, 10) && call(&mut cache, 4, 10));
    assert!(!call(&mut cache, 2, 10), "which has taken the place of item 1");
    assert!(!call(&mut cache, 1, 10));
    // A larger entry takes the room of several.
    let large = (2 * entry - key(&[1]).bytes(0)) / size_of::<f32>();
    assert!(!call(&mut cache, 5, large));
    assert!(cache.counts().bytes as usize <= 3 * entry && cache.entries.len() == 2);
    assert!(call(&mut cache, 5, large) && call(&mut cache, 1, 10));
    assert_eq!(cache.entries.len(), cache.by_use.len());
}

#[test]
fn what_is_larger_than_the_cache_is_not_kept_and_displaces_nothing() {
    let mut cache = EncoderCache::new(2 * key(&[1]).bytes(4));
    assert!(!call(&mut cache, 1, 4) && !call(&mut cache, 2, 1000) && !call(&mut cache, 2, 1000));
    assert!(call(&mut cache, 1, 4));
    let mut none = EncoderCache::new(0);
    assert!(!call(&mut none, 1, 0) && !call(&mut none, 1, 0));
    assert_eq!(none.counts(), EncoderCounts { misses: 2, ..EncoderCounts::default() });
}
