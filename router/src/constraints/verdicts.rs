//! The results of checks, by the constraint's message. Clients send the same few schemas again and again.

use std::{collections::HashMap, mem, sync::Arc};

use parking_lot::Mutex;
use tutti_constraints::ConstraintError;

/// The result of a check.
pub type Verdict = Result<(), ConstraintError>;

/// Approximate bytes of an entry besides its key and its error.
const ENTRY_BYTES: usize = 128;

/// Results of checks, bounded by bytes. An entry that is not used while half of the room is filled anew is dropped.
///
/// The keys are whole messages: callers could construct two messages with one hash.
#[derive(Debug)]
pub struct Verdicts {
    max_bytes: usize,
    generations: Mutex<Generations>,
}

/// The entries used lately, and those of the time before.
#[derive(Debug, Default)]
struct Generations {
    new: HashMap<Arc<[u8]>, Verdict>,
    old: HashMap<Arc<[u8]>, Verdict>,
    new_bytes: usize,
}

impl Verdicts {
    /// Creates an empty cache.
    pub fn new(max_bytes: usize) -> Self {
        Self { max_bytes, generations: Mutex::default() }
    }

    /// Returns a result that is known.
    pub fn get(&self, key: &Arc<[u8]>) -> Option<Verdict> {
        let mut generations = self.generations.lock();
        if let Some(verdict) = generations.new.get(key) {
            return Some(verdict.clone());
        }
        let verdict = generations.old.remove(key)?;
        self.put(&mut generations, key.clone(), verdict.clone());
        Some(verdict)
    }

    /// Keeps a result. An error of a time limit is not kept: the next check may be in time.
    pub fn keep(&self, key: Arc<[u8]>, verdict: Verdict) {
        if !verdict.as_ref().is_err_and(ConstraintError::is_of_time) {
            self.put(&mut self.generations.lock(), key, verdict);
        }
    }

    fn put(&self, generations: &mut Generations, key: Arc<[u8]>, verdict: Verdict) {
        let bytes = bytes(&key, &verdict);
        if bytes > self.max_bytes / 2 {
            return;
        }
        if generations.new_bytes + bytes > self.max_bytes / 2 {
            generations.old = mem::take(&mut generations.new);
            generations.new_bytes = 0;
        }
        if generations.new.insert(key, verdict).is_none() {
            generations.new_bytes += bytes;
        }
    }

    /// Approximate size in bytes.
    #[cfg(test)]
    fn bytes(&self) -> usize {
        let generations = self.generations.lock();
        let all = generations.new.iter().chain(&generations.old);
        all.map(|(key, verdict)| bytes(key, verdict)).sum()
    }
}

fn bytes(key: &[u8], verdict: &Verdict) -> usize {
    let error = verdict.as_ref().err();
    ENTRY_BYTES + key.len() + error.map_or(0, |error| error.path.len() + error.message.len())
}

#[cfg(test)]
mod tests;
