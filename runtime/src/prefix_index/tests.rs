use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const MINUTE: Duration = Duration::from_secs(60);

/// A prompt, cut into blocks of two tokens.
struct Prompt(Vec<u32>, PromptPieces);

fn blocks(tokens: &[u32]) -> Prompt {
    Prompt(tokens.to_vec(), PromptPieces::new(tokens, CacheSalt::default(), 2))
}

/// A prompt whose pieces have 1, 1, 2, 2, 4, 4, … blocks.
fn growing(tokens: &[u32]) -> Prompt {
    Prompt(tokens.to_vec(), PromptPieces::growing(tokens, 2, 2))
}

impl PrefixIndex {
    fn has(&self, Prompt(tokens, pieces): &Prompt, now: Instant) -> Vec<(Holder, usize)> {
        self.held(pieces, tokens, now)
    }

    fn take(&mut self, Prompt(tokens, pieces): &Prompt, holder: u64, now: Instant) {
        self.insert(pieces, tokens, Holder(holder), now);
    }
}

fn index() -> PrefixIndex {
    PrefixIndex::new(1 << 20, MINUTE)
}

#[test]
fn whole_shared_blocks_are_found_for_each_holder() {
    let (mut index, now) = (index(), Instant::now());
    index.take(&blocks(&[1, 2, 3, 4, 5]), 1, now);
    index.take(&blocks(&[1, 2, 9, 9]), 2, now);
    assert_eq!(index.size().entries, 3, "a partial block is not indexed, and a shared block is indexed once");
    assert_eq!(index.has(&blocks(&[1, 2, 3, 4, 7, 7]), now), [(Holder(1), 2), (Holder(2), 1)]);
    assert_eq!(index.has(&blocks(&[3, 4]), now), [], "a block counts only after the same blocks");
}

#[test]
fn an_entry_that_was_not_used_for_max_age_is_gone() {
    let (mut index, now) = (index(), Instant::now());
    index.take(&blocks(&[1, 2, 3, 4]), 1, now);
    index.take(&blocks(&[1, 2]), 1, now + MINUTE);
    let later = now + MINUTE + MINUTE / 2;
    assert_eq!(index.has(&blocks(&[1, 2, 3, 4]), later), [(Holder(1), 1)]);
    index.take(&blocks(&[8, 8]), 1, later);
    assert_eq!(index.size().entries, 2, "the aged block makes room");
}

#[test]
fn over_the_bound_the_least_recent_goes_first_and_leaves_before_their_parents() {
    let now = Instant::now();
    let room = 3 * bytes_of_block(2);
    let mut index = PrefixIndex::new(room, MINUTE);
    index.take(&blocks(&[1, 1, 2, 2, 3, 3]), 1, now);
    index.take(&blocks(&[7, 7]), 1, now);
    assert_eq!(index.has(&blocks(&[1, 1, 2, 2, 3, 3]), now), [(Holder(1), 2)]);
    index.take(&blocks(&[4, 4, 5, 5, 6, 6, 8, 8, 9, 9]), 1, now);
    assert_eq!(index.has(&blocks(&[4, 4, 5, 5, 6, 6, 8, 8, 9, 9]), now), [(Holder(1), 3)]);
    assert_eq!(index.size(), IndexSize { entries: 3, bytes: room });
    index.bound(room - 1);
    assert_eq!(index.size().entries, 2);
    let mut none = PrefixIndex::new(0, MINUTE);
    none.take(&blocks(&[1, 1]), 1, now);
    assert_eq!(none.size(), IndexSize::default());
}

#[test]
fn a_collision_costs_a_hit_and_never_gives_a_wrong_one() {
    let now = Instant::now();
    let collide = |tokens: &[u32]| {
        let mut prompt = blocks(tokens);
        (0..).zip(prompt.1.hashes_mut()).for_each(|(index, hash)| *hash = index);
        prompt
    };
    let mut index = index();
    index.take(&collide(&[1, 1, 2, 2]), 1, now);
    index.take(&collide(&[3, 3, 2, 2]), 2, now);
    assert_eq!(index.has(&collide(&[1, 1, 2, 2]), now), [(Holder(1), 2)]);
    assert_eq!(index.has(&collide(&[3, 3, 2, 2]), now), []);
}

#[test]
fn prompts_with_unequal_salts_share_nothing_even_if_their_hashes_collide() {
    let now = Instant::now();
    let salts = [CacheSalt::default(), CacheSalt::new([1; 16]), CacheSalt::new([2; 16])];
    let salted = |salt| Prompt(vec![1, 2, 3, 4], PromptPieces::new(&[1, 2, 3, 4], salt, 2));
    let mut index = index();
    for (holder, salt) in (0..).zip(salts) {
        index.take(&salted(salt), holder, now);
    }
    assert_eq!(index.size().entries, 6);
    for (holder, salt) in (0..).zip(salts) {
        assert_eq!(index.has(&salted(salt), now), [(Holder(holder), 2)]);
    }
    let mut colliding = salted(CacheSalt::new([3; 16]));
    let other = salted(salts[1]).1.hashes_mut().map(|hash| *hash).collect::<Vec<_>>();
    colliding.1.hashes_mut().zip(other).for_each(|(hash, other)| *hash = other);
    assert_eq!(index.has(&colliding, now), []);
}

/// A model without bounds: all inserted prefixes with their holders, and the time of the last insertion.
#[derive(Default)]
struct Model(BTreeMap<(Vec<u32>, Holder), Instant>);

impl Model {
    fn held(&self, tokens: &[u32], now: Instant) -> Vec<(Holder, usize)> {
        let mut found = BTreeMap::new();
        for ((prefix, holder), at) in &self.0 {
            if tokens.starts_with(prefix) && now - *at <= MINUTE {
                let blocks = found.entry(*holder).or_insert(0);
                *blocks = (prefix.len() / 2).max(*blocks);
            }
        }
        found.into_iter().collect()
    }
}

proptest! {
    #[test]
    fn it_agrees_with_a_list_of_all_prefixes_as_far_as_it_has_room(
        sent in prop::collection::vec((prop::collection::vec(0u32..2, 0..17), 0u64..3, 0u64..25), 1..60),
        asked in prop::collection::vec(0u32..2, 0..17),
        room in prop_oneof![Just(1usize << 20), 0usize..2000],
        buckets in prop_oneof![Just(u64::MAX), 1u64..20],
    ) {
        let cut = |tokens: &[u32]| {
            let mut prompt = growing(tokens);
            prompt.1.hashes_mut().for_each(|hash| *hash %= buckets);
            prompt
        };
        let (mut index, mut model, mut now) = (PrefixIndex::new(room, MINUTE), Model::default(), Instant::now());
        for (tokens, holder, seconds) in sent {
            now += Duration::from_secs(seconds);
            index.take(&cut(&tokens), holder, now);
            for end in [2, 4, 8, 12].into_iter().filter(|end| *end <= tokens.len()) {
                model.0.insert((tokens[..end].to_vec(), Holder(holder)), now);
            }
            prop_assert!(index.size().bytes <= room);
            let mut held = index.has(&cut(&asked), now);
            held.sort_unstable();
            let expected = model.held(&asked, now);
            if room == 1 << 20 && buckets == u64::MAX {
                prop_assert_eq!(held, expected);
            } else {
                let all: BTreeMap<_, _> = expected.into_iter().collect();
                prop_assert!(held.iter().all(|(holder, blocks)| all.get(holder) >= Some(blocks)));
            }
        }
        // The counters match the entries, and every child has its parent.
        let entries: Vec<_> = index.slots.iter().flatten().collect();
        let bytes: usize = entries.iter().map(|e| entry_bytes(e.tokens.len()) + holders_bytes(e.holders.len())).sum();
        prop_assert_eq!(IndexSize { entries: entries.len(), bytes }, index.size());
        let has_parent = |e: &&Entry| !matches!(e.parent, Parent::Piece(p) if index.slots[p as usize].is_none());
        prop_assert!(entries.iter().all(has_parent));
    }
}
