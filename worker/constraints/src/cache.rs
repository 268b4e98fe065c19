//! Base matchers by content, from which requests with equal constraints are forked.

use std::{collections::HashMap, panic::AssertUnwindSafe};

use llguidance::{TokenParser, panic_utils};

use crate::{
    constraint::{Canonical, Constraint},
    environment::Environment,
    error::ConstraintError,
    limits::STALE_LEXER_STATES,
    matcher::Matcher,
};

/// Compiled constraints, bounded by bytes. The one that was used longest ago is dropped first.
///
/// Matchers of one base share the states of its lexer, which a lock guards: requests find warm states, and threads wait for
/// one another. So every thread of a pool has a cache of its own.
pub struct BaseMatchers {
    bases: HashMap<Canonical, Base>,
    max_bytes: usize,
    clock: u64,
    counts: CacheCounts,
}

/// Uses of a cache since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// Constraints that were compiled already.
    pub hits: u64,
    /// Constraints that were compiled.
    pub compilations: u64,
}

/// A compiled constraint at its beginning.
struct Base {
    parser: TokenParser,
    used: u64,
}

/// Size in bytes of a compiled grammar per byte of its text, at least. The library tells the size of lexers alone.
const GRAMMAR_BYTES_PER_BYTE: usize = 64;

impl BaseMatchers {
    /// An empty cache.
    pub fn new(max_bytes: usize) -> Self {
        Self { bases: HashMap::new(), max_bytes, clock: 0, counts: CacheCounts::default() }
    }

    /// A matcher at the beginning of a constraint, compiled if no request had the same constraint before.
    pub fn matcher(
        &mut self,
        environment: &Environment,
        constraint: &Constraint,
    ) -> Result<Matcher, ConstraintError> {
        self.clock += 1;
        let key = constraint.canonical();
        if let Some(base) = self.bases.get_mut(&key)
            && !base.is_stale()
        {
            base.used = self.clock;
            self.counts.hits += 1;
            return Ok(environment.matcher(base.parser.clone()));
        }
        self.bases.remove(&key);
        self.counts.compilations += 1;
        let parser = environment.compile_parser(constraint)?;
        let matcher = environment.matcher(parser.clone());
        self.bases.insert(key, Base { parser, used: self.clock });
        self.shrink();
        Ok(matcher)
    }

    /// Drops a constraint, after a matcher of it has failed. A failure may have left the shared states unusable.
    pub fn forget(&mut self, constraint: &Constraint) {
        self.bases.remove(&constraint.canonical());
    }

    /// Uses since the start.
    pub fn counts(&self) -> CacheCounts {
        self.counts
    }

    /// Number of compiled constraints.
    pub fn len(&self) -> usize {
        self.bases.len()
    }

    /// True if the cache holds no constraint.
    pub fn is_empty(&self) -> bool {
        self.bases.is_empty()
    }

    /// Size in bytes. It grows while matchers visit new states, so it is computed each time.
    pub fn bytes(&self) -> usize {
        self.bases.iter().map(|(key, base)| base.bytes(key)).sum()
    }

    fn shrink(&mut self) {
        let mut bytes = self.bytes();
        while bytes > self.max_bytes {
            let Some(oldest) =
                self.bases.iter().min_by_key(|(_, base)| base.used).map(|(key, _)| key.clone())
            else {
                return;
            };
            if let Some(base) = self.bases.remove(&oldest) {
                bytes -= base.bytes(&oldest).min(bytes);
            }
        }
    }
}

impl Base {
    /// True if new matchers should not share these states: a matcher failed in them, or they are about to reach the limit, which
    /// would end requests because of what others generated.
    fn is_stale(&self) -> bool {
        self.lexer_size().is_none_or(|(states, _)| states > STALE_LEXER_STATES)
    }

    fn bytes(&self, key: &Canonical) -> usize {
        let lexer = self.lexer_size().map_or(0, |(_, bytes)| bytes);
        lexer + key.bytes() * GRAMMAR_BYTES_PER_BYTE
    }

    /// States and bytes of the lexer. `None` if a matcher has failed in it.
    fn lexer_size(&self) -> Option<(usize, usize)> {
        // A panic inside the lock leaves it poisoned, and the library unwraps it.
        let read = || Ok(self.parser.parser.lexer_stats());
        let stats = panic_utils::catch_unwind(AssertUnwindSafe(read)).ok().filter(|stats| !stats.error)?;
        Some((stats.num_states, stats.num_bytes))
    }
}
