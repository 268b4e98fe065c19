//! An index of prompt prefixes and of the holders to which they were sent. It is bounded in bytes and in age.
//!
//! Router and conductor both use this index: a router's holders are conductors, and a conductor's holders are its
//! groups of workers. Neither crate depends on the other, and `proto` has no logic, so the index is here, in the one
//! crate that both depend on.
//!
//! A prefix is a chain of pieces, each of one or more whole blocks of tokens. The entry of a piece is found by the hash
//! of its salt and of all tokens up to the piece's end. A found entry counts only if its tokens equal the piece's and
//! its parent is the entry of the previous piece, so a hash collision can cost a hit but never gives a wrong one. The
//! parent of a prompt's first piece is the prompt's salt.
//!
//! Using a prefix touches its entries from the last piece to the first, so that a parent is always more recent than its
//! children. The least recent entry, which is evicted first, therefore has no children.

mod pieces;
mod recency;

use std::{
    collections::HashMap,
    mem::size_of,
    time::{Duration, Instant},
};

use tutti_proto::{
    CacheSalt,
    cluster::v1::{self as pb, plane},
};

pub use self::pieces::PromptPieces;
use self::recency::Recency;

/// Tokens per block for a model that declares no paged plane.
const BLOCK_TOKENS: usize = 16;

/// Tokens per block: as many as in a page of the model's KV cache.
pub fn block_tokens(model: &pb::ModelDescription) -> usize {
    let planes = model.declaration.as_ref().map_or(&[][..], |declaration| &declaration.planes);
    let page_tokens = planes.iter().find_map(|plane| match plane.kind? {
        plane::Kind::Paged(paged) => Some(paged.page_tokens as usize),
        plane::Kind::Slot(_) => None,
    });
    page_tokens.filter(|tokens| *tokens > 0).unwrap_or(BLOCK_TOKENS)
}

/// A holder of prefixes. A restarted conductor or worker group is a new holder, because its cache is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Holder(pub u64);

/// The size of an index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexSize {
    /// Number of indexed pieces. A piece is one or more whole blocks of a prompt.
    pub entries: usize,
    /// Bytes of the indexed pieces. The index's bound limits this number.
    pub bytes: usize,
}

#[derive(Debug)]
struct Entry {
    hash: u64,
    parent: Parent,
    tokens: Box<[u32]>,
    /// Holders to which the prefix was sent, each with the time of the last sending.
    holders: Vec<(Holder, Instant)>,
    used: Instant,
}

/// Whatever comes before a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parent {
    /// Nothing: the piece is the first of a prompt with this salt.
    Start(CacheSalt),
    /// The slot of the previous piece's entry.
    Piece(u32),
}

/// The index; see the module's documentation.
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
    /// An index of at most `max_bytes` bytes, where 0 turns it off. It forgets entries that were not used for
    /// `max_age`.
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

    /// Changes the bound to `max_bytes`, and evicts entries beyond it.
    pub fn bound(&mut self, max_bytes: usize) {
        self.max_bytes = max_bytes;
        self.make_room();
    }

    /// The holders of prefixes of the prompt, each with the number of the prompt's blocks that this holder has.
    pub fn held(&self, pieces: &PromptPieces, prompt: &[u32], now: Instant) -> Vec<(Holder, usize)> {
        // Only a holder of all pieces so far can hold the next one. `before` is the number of blocks in the pieces so
        // far.
        let mut found: Vec<(Holder, usize)> = Vec::new();
        let (mut parent, mut before) = (Parent::Start(pieces.salt), 0);
        for piece in pieces.of(prompt) {
            let Some(slot) = self.find(piece.hash, parent, piece.tokens) else { break };
            let Some(entry) = &self.slots[slot as usize] else { break };
            let mut any = false;
            for (holder, _) in entry.holders.iter().filter(|(_, at)| self.is_fresh(*at, now)) {
                if before == 0 {
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
            parent = Parent::Piece(slot);
            before += piece.blocks;
        }
        found
    }

    /// Records that this prompt is sent to this holder.
    pub fn insert(&mut self, pieces: &PromptPieces, prompt: &[u32], holder: Holder, now: Instant) {
        self.forget_old(now);
        let mut path = Vec::new();
        let mut room = self.max_bytes;
        for piece in pieces.of(prompt) {
            // If a prompt is larger than the whole index, only its beginning is indexed.
            let Some(left) = room.checked_sub(entry_bytes(piece.tokens.len()) + holders_bytes(1)) else {
                break;
            };
            room = left;
            let parent = path.last().map_or(Parent::Start(pieces.salt), |&slot| Parent::Piece(slot));
            let slot = match self.find(piece.hash, parent, piece.tokens) {
                Some(slot) => slot,
                // If the entry of another prefix has the same hash, that entry stays and the rest of this prompt is not
                // indexed.
                None if self.by_hash.contains_key(&piece.hash) => break,
                None => self.add(piece.hash, parent, piece.tokens, now),
            };
            path.push(slot);
            self.record_holder(slot, holder, now);
        }
        for slot in path.iter().rev() {
            self.recency.touch(*slot);
        }
        self.make_room();
    }

    /// The index's size.
    pub fn size(&self) -> IndexSize {
        IndexSize { entries: self.by_hash.len(), bytes: self.bytes }
    }

    fn is_fresh(&self, at: Instant, now: Instant) -> bool {
        now.saturating_duration_since(at) <= self.max_age
    }

    fn find(&self, hash: u64, parent: Parent, tokens: &[u32]) -> Option<u32> {
        let slot = *self.by_hash.get(&hash)?;
        let entry = self.slots[slot as usize].as_ref()?;
        (entry.parent == parent && *entry.tokens == *tokens).then_some(slot)
    }

    fn add(&mut self, hash: u64, parent: Parent, tokens: &[u32], now: Instant) -> u32 {
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

    /// Records the holder at an entry, and removes the entry's holders that are older than `max_age`.
    fn record_holder(&mut self, slot: u32, holder: Holder, now: Instant) {
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

    /// Removes the least recent entry. False if there is none.
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

/// Bytes of an entry of one block with one holder.
pub const fn bytes_of_block(block_tokens: usize) -> usize {
    entry_bytes(block_tokens) + holders_bytes(1)
}

/// Bytes of an entry without its holders: the entry itself, and the entry's tokens, hash-table slot and links in the
/// recency order.
const fn entry_bytes(tokens: usize) -> usize {
    size_of::<Option<Entry>>() + tokens * size_of::<u32>() + 3 * size_of::<u64>() + 2 * size_of::<u32>()
}

const fn holders_bytes(count: usize) -> usize {
    count * size_of::<(Holder, Instant)>()
}

#[cfg(test)]
mod tests;
