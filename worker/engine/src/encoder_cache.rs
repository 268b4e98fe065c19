//! Embeddings of media that this engine has encoded, kept for further requests with the same media.
//!
//! The prefix cache spares the encoder nothing if other text stands in front of a picture, and neither does it once its
//! pages are taken. Embeddings depend on no text, so they are found wherever the media stand.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use tutti_proto::{CacheSalt, declaration::WalkId};

/// Bytes that count for an entry in addition to its embeddings: the key and the maps' own memory.
const ENTRY_BYTES: usize = 256;
/// Bytes per item of a key.
const DIGEST_BYTES: usize = 16;

/// Everything that decides the embeddings of an encoder's call, and who may know of them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CallKey {
    /// The encoder's walk.
    pub walk: WalkId,
    /// The salt of the request. Callers that share no prefixes share no embeddings, because the time of an answer would
    /// tell one of them what another has sent.
    pub salt: CacheSalt,
    /// Digests of all items of the call in order, because items that are encoded together change each other.
    pub items: Vec<[u8; DIGEST_BYTES]>,
}

/// Counts of an engine's encoder calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EncoderCounts {
    /// Calls whose embeddings were in the cache.
    pub hits: u64,
    /// Calls that an encoder ran.
    pub misses: u64,
    /// Bytes that the cache holds.
    pub bytes: u64,
    /// Tokens of padding that encoders computed.
    pub padding_tokens: u64,
}

/// Embeddings of calls, the least recently used of which make room for others.
#[derive(Debug, Default)]
pub(crate) struct EncoderCache {
    /// Maximum number of bytes of all entries.
    limit: usize,
    entries: HashMap<Arc<CallKey>, Entry>,
    /// Keys by the time of their last use.
    by_use: BTreeMap<u64, Arc<CallKey>>,
    /// Time of the next use.
    now: u64,
    counts: EncoderCounts,
}

#[derive(Debug)]
struct Entry {
    values: Box<[f32]>,
    used: u64,
}

impl CallKey {
    fn bytes(&self, values: usize) -> usize {
        values * size_of::<f32>() + self.items.len() * DIGEST_BYTES + ENTRY_BYTES
    }
}

impl EncoderCache {
    /// Creates a cache of at most `limit` bytes; 0 keeps nothing.
    pub fn new(limit: usize) -> Self {
        Self { limit, ..Self::default() }
    }

    /// The counts since the engine began.
    pub fn counts(&self) -> EncoderCounts {
        self.counts
    }

    /// Counts tokens of padding that an encoder has computed.
    pub fn count_padding(&mut self, tokens: usize) {
        self.counts.padding_tokens += tokens as u64;
    }

    /// Returns the embeddings of a call, and counts a hit. `None`, and a miss, if they are not here or if the call has
    /// no key.
    pub fn find(&mut self, key: Option<&CallKey>) -> Option<&[f32]> {
        let entry = match key {
            Some(key) => self.entries.get_mut(key),
            None => None,
        };
        let Some(entry) = entry else {
            self.counts.misses += 1;
            return None;
        };
        self.counts.hits += 1;
        if let Some(key) = self.by_use.remove(&entry.used) {
            entry.used = self.now;
            self.by_use.insert(self.now, key);
            self.now += 1;
        }
        Some(&entry.values)
    }

    /// Keeps the embeddings of a call that was not found. Embeddings that are larger than the whole cache are not kept.
    pub fn keep(&mut self, key: &CallKey, values: &[f32]) {
        let bytes = key.bytes(values.len());
        if bytes > self.limit || self.entries.contains_key(key) {
            return;
        }
        while self.counts.bytes as usize + bytes > self.limit
            && let Some((_, oldest)) = self.by_use.pop_first()
        {
            let values = self.entries.remove(&oldest).map_or(0, |entry| entry.values.len());
            self.counts.bytes -= oldest.bytes(values) as u64;
        }
        let key = Arc::new(key.clone());
        self.by_use.insert(self.now, key.clone());
        self.entries.insert(key, Entry { values: values.into(), used: self.now });
        self.now += 1;
        self.counts.bytes += bytes as u64;
    }
}

#[cfg(test)]
mod tests;
