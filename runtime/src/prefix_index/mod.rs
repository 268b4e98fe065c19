//! Who was sent which prompt prefixes, within a bound on bytes and on age: a router asks it of conductors, a conductor of
//! its groups of workers.
//!
//! A prefix is a chain of pieces, each of one or more whole blocks of tokens. An entry is found by a hash chained over the
//! pieces before it, and is believed only if its own tokens are those of the prompt and its parent is the entry that the
//! walk came from: a collision costs a hit, never gives a wrong one.
//!
//! Using a prefix touches its entries from the last piece to the first, so that a parent is always more recent than its
//! children: what is evicted, the least recent, has none.

mod pieces;
mod recency;

use std::{
    collections::HashMap,
    mem::size_of,
    time::{Duration, Instant},
};

use tutti_proto::cluster::v1::{self as pb, plane};

pub use self::pieces::PromptPieces;
use self::recency::Recency;

/// Blocks of a model that declares no paged plane.
const BLOCK_TOKENS: usize = 16;

/// Tokens of a block: what a page of the model's KV cache holds.
pub fn block_tokens(model: &pb::ModelDescription) -> usize {
    let planes = model.declaration.as_ref().map_or(&[][..], |declaration| &declaration.planes);
    let paged = planes.iter().find_map(|plane| plane.kind);
    let paged = paged.map(|plane::Kind::PagedKv(paged)| paged.page_tokens as usize);
    paged.filter(|tokens| *tokens > 0).unwrap_or(BLOCK_TOKENS)
}

/// One life of whoever holds prefixes: when it comes back from the dead, what it held is gone, and it has another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Holder(pub u64);

#[derive(Debug)]
struct Entry {
    hash: u64,
    /// The slot of the piece before; none for a prompt's first.
    parent: Option<u32>,
    tokens: Box<[u32]>,
    /// Who was sent it, and when last.
    holders: Vec<(Holder, Instant)>,
    used: Instant,
}

/// See the module.
#[derive(Debug)]
pub struct PrefixIndex {
    max_bytes: usize,
    max_age: Duration,
    slots: Vec<Option<Entry>>,
    free: Vec<u32>,
    by_hash: HashMap<u64, u32>,
    recency: Recency,
    bytes: usize,
}

impl PrefixIndex {
    /// An index of at most so many bytes, 0 for none at all, that forgets what was not used for `max_age`.
    pub fn new(max_bytes: usize, max_age: Duration) -> Self {
        Self {
            max_bytes,
            max_age,
            slots: Vec::new(),
            free: Vec::new(),
            by_hash: HashMap::new(),
            recency: Recency::default(),
            bytes: 0,
        }
    }

    /// The same index, of at most so many bytes from now on.
    pub fn bound(&mut self, max_bytes: usize) {
        self.max_bytes = max_bytes;
        self.make_room();
    }

    /// For each holder of any of the prompt's prefixes, how many of its blocks that is.
    pub fn held(&self, pieces: &PromptPieces, prompt: &[u32], now: Instant) -> Vec<(Holder, usize)> {
        // Those that hold all pieces so far have all blocks so far.
        let mut found: Vec<(Holder, usize)> = Vec::new();
        let (mut parent, mut before) = (None, 0);
        for piece in pieces.of(prompt) {
            let Some(slot) = self.find(piece.hash, parent, piece.tokens) else { break };
            let Some(entry) = &self.slots[slot as usize] else { break };
            let mut any = false;
            for (holder, _) in entry.holders.iter().filter(|(_, at)| self.is_fresh(*at, now)) {
                if parent.is_none() {
                    found.push((*holder, piece.blocks));
                    any = true;
                } else if let Some((_, blocks)) = found.iter_mut().find(|f| **f == (*holder, before)) {
                    *blocks += piece.blocks;
                    any = true;
                }
            }
            if !any {
                break;
            }
            parent = Some(slot);
            before += piece.blocks;
        }
        found
    }

    /// Takes into account that this prompt is being sent there.
    pub fn insert(&mut self, pieces: &PromptPieces, prompt: &[u32], holder: Holder, now: Instant) {
        self.forget_old(now);
        let mut path = Vec::new();
        let mut room = self.max_bytes;
        for piece in pieces.of(prompt) {
            // A prompt too long for all of the index keeps its beginning.
            let Some(left) = room.checked_sub(entry_bytes(piece.tokens.len()) + holders_bytes(1)) else {
                break;
            };
            room = left;
            let parent = path.last().copied();
            let slot = match self.find(piece.hash, parent, piece.tokens) {
                Some(slot) => slot,
                // Another prefix of the same hash is there: it stays.
                None if self.by_hash.contains_key(&piece.hash) => break,
                None => self.add(piece.hash, parent, piece.tokens, now),
            };
            path.push(slot);
            self.note(slot, holder, now);
        }
        for slot in path.iter().rev() {
            self.recency.touch(*slot);
        }
        self.make_room();
    }

    /// How many pieces are indexed.
    pub fn entries(&self) -> usize {
        self.by_hash.len()
    }

    /// What they take, as the bound counts it.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn is_fresh(&self, at: Instant, now: Instant) -> bool {
        now.saturating_duration_since(at) <= self.max_age
    }

    fn find(&self, hash: u64, parent: Option<u32>, tokens: &[u32]) -> Option<u32> {
        let slot = *self.by_hash.get(&hash)?;
        let entry = self.slots[slot as usize].as_ref()?;
        (entry.parent == parent && *entry.tokens == *tokens).then_some(slot)
    }

    fn add(&mut self, hash: u64, parent: Option<u32>, tokens: &[u32], now: Instant) -> u32 {
        let entry = Entry { hash, parent, tokens: tokens.into(), holders: Vec::new(), used: now };
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.slots[slot as usize] = Some(entry);
        self.by_hash.insert(hash, slot);
        self.recency.push(slot);
        self.bytes += entry_bytes(tokens.len());
        slot
    }

    /// Notes the holder at an entry, and lets go of those whose time is over.
    fn note(&mut self, slot: u32, holder: Holder, now: Instant) {
        let max_age = self.max_age;
        let Some(entry) = &mut self.slots[slot as usize] else { return };
        self.bytes -= holders_bytes(entry.holders.len());
        entry.used = now;
        entry.holders.retain(|(h, at)| *h != holder && now.saturating_duration_since(*at) <= max_age);
        entry.holders.push((holder, now));
        self.bytes += holders_bytes(entry.holders.len());
    }

    fn forget_old(&mut self, now: Instant) {
        while let Some(oldest) = self.recency.oldest() {
            let entry = self.slots[oldest as usize].as_ref();
            if entry.is_some_and(|entry| self.is_fresh(entry.used, now)) || !self.evict() {
                break;
            }
        }
    }

    fn make_room(&mut self) {
        while self.bytes > self.max_bytes && self.evict() {}
    }

    /// Lets go of the entry used longest ago; false if there is none.
    fn evict(&mut self) -> bool {
        let Some(slot) = self.recency.oldest() else { return false };
        self.recency.remove(slot);
        if let Some(entry) = self.slots[slot as usize].take() {
            self.by_hash.remove(&entry.hash);
            self.bytes -= entry_bytes(entry.tokens.len()) + holders_bytes(entry.holders.len());
            self.free.push(slot);
        }
        true
    }
}

/// What an entry of one block takes that one holder has.
pub const fn bytes_of_block(block_tokens: usize) -> usize {
    entry_bytes(block_tokens) + holders_bytes(1)
}

/// What an entry takes without its holders: itself, its tokens, its place in the table and in the order.
const fn entry_bytes(tokens: usize) -> usize {
    size_of::<Option<Entry>>() + tokens * size_of::<u32>() + 3 * size_of::<u64>() + 2 * size_of::<u32>()
}

const fn holders_bytes(count: usize) -> usize {
    count * size_of::<(Holder, Instant)>()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    /// A prompt, cut into blocks of two tokens.
    struct Prompt(Vec<u32>, PromptPieces);

    fn blocks(tokens: &[u32]) -> Prompt {
        Prompt(tokens.to_vec(), PromptPieces::new(tokens, 2))
    }

    /// Its pieces are of one block, one block, two, two, four, and so on.
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
        assert_eq!(index.entries(), 3, "what is left over is no block, what is shared is one");
        assert_eq!(index.has(&blocks(&[1, 2, 3, 4, 7, 7]), now), [(Holder(1), 2), (Holder(2), 1)]);
        assert_eq!(index.has(&blocks(&[3, 4]), now), [], "a block counts only behind the same blocks");
    }

    #[test]
    fn what_was_not_used_for_its_age_is_gone() {
        let (mut index, now) = (index(), Instant::now());
        index.take(&blocks(&[1, 2, 3, 4]), 1, now);
        index.take(&blocks(&[1, 2]), 1, now + MINUTE);
        let later = now + MINUTE + MINUTE / 2;
        assert_eq!(index.has(&blocks(&[1, 2, 3, 4]), later), [(Holder(1), 1)]);
        index.take(&blocks(&[8, 8]), 1, later);
        assert_eq!(index.entries(), 2, "the aged block makes room");
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
        assert_eq!((index.bytes(), index.entries()), (room, 3));
        index.bound(room - 1);
        assert_eq!(index.entries(), 2);
        let mut none = PrefixIndex::new(0, MINUTE);
        none.take(&blocks(&[1, 1]), 1, now);
        assert_eq!((none.bytes(), none.entries()), (0, 0));
    }

    #[test]
    fn a_collision_costs_a_hit_and_never_gives_a_wrong_one() {
        let now = Instant::now();
        let collide = |tokens: &[u32]| {
            let mut prompt = blocks(tokens);
            (0..).zip(prompt.1.hashes_mut()).for_each(|(place, hash)| *hash = place);
            prompt
        };
        let mut index = index();
        index.take(&collide(&[1, 1, 2, 2]), 1, now);
        index.take(&collide(&[3, 3, 2, 2]), 2, now);
        assert_eq!(index.has(&collide(&[1, 1, 2, 2]), now), [(Holder(1), 2)]);
        assert_eq!(index.has(&collide(&[3, 3, 2, 2]), now), []);
    }

    /// What was inserted, without any bound: prefixes by holder, and when.
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
                prop_assert!(index.bytes() <= room);
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
            // What is counted is what is there, and every child has its parent.
            let entries: Vec<_> = index.slots.iter().flatten().collect();
            let bytes: usize = entries.iter().map(|e| entry_bytes(e.tokens.len()) + holders_bytes(e.holders.len())).sum();
            prop_assert_eq!((entries.len(), bytes), (index.entries(), index.bytes()));
            prop_assert!(entries.iter().all(|e| e.parent.is_none_or(|p| index.slots[p as usize].is_some())));
        }
    }
}
