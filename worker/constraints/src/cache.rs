//! Compiled constraints by content, from which the matchers of requests are copied.

use std::collections::HashMap;

use llguidance::TokenParser;

use crate::{
    constraint::{Canonical, Constraint},
    environment::Environment,
    error::ConstraintError,
    limits::Fuel,
    matcher::{Matcher, Progress, lexer_bytes},
};

/// Compiled constraints, bounded by bytes. The least recently used constraint is dropped first.
///
/// The first mask of a cached constraint is already computed, because the first mask is the slowest. After that, a
/// cached constraint never changes: requests advance copies of it. So a matcher's limits depend on its own tokens, and
/// not on earlier requests.
pub struct BaseMatchers {
    bases: HashMap<(Canonical, Fuel), Base>,
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
    bytes: usize,
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
        self.with_fuel(environment, constraint, Fuel::OF_A_STEP)
    }

    /// A matcher behind the tokens that a request generated before, as after a replay or on another worker. Its masks
    /// are those of the matcher that committed each of them.
    ///
    /// It does not fail at a token at which the first matcher did not fail. The cost of a mask depends on the lexer's
    /// states that earlier masks visited. Without these, one mask may have to visit the states of many. So one step has
    /// the fuel of as many steps as there are tokens.
    pub fn replayed(
        &mut self,
        environment: &Environment,
        constraint: &Constraint,
        tokens: &[u32],
    ) -> Result<(Matcher, Progress), ConstraintError> {
        let mut matcher = self.before_replay(environment, constraint, tokens.len())?;
        let progress = matcher.advance(tokens)?;
        Ok((matcher, progress))
    }

    /// A matcher at the beginning of a constraint, with the limits of a replay of this many tokens. The caller advances
    /// it in parts of any size, and may make masks between them.
    pub fn before_replay(
        &mut self,
        environment: &Environment,
        constraint: &Constraint,
        tokens: usize,
    ) -> Result<Matcher, ConstraintError> {
        self.with_fuel(environment, constraint, Fuel::of_a_replay(tokens))
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

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bases.values().map(|base| base.bytes).sum()
    }

    fn with_fuel(
        &mut self,
        environment: &Environment,
        constraint: &Constraint,
        fuel: Fuel,
    ) -> Result<Matcher, ConstraintError> {
        self.clock += 1;
        let key = (constraint.canonical(), fuel);
        if let Some(base) = self.bases.get_mut(&key) {
            base.used = self.clock;
            self.counts.hits += 1;
            return Ok(environment.matcher(&base.parser));
        }
        self.counts.compilations += 1;
        let parser = environment.base(constraint, fuel)?;
        let matcher = environment.matcher(&parser);
        let bytes = lexer_bytes(&parser) + key.0.bytes() * GRAMMAR_BYTES_PER_BYTE;
        self.bases.insert(key, Base { parser, bytes, used: self.clock });
        self.shrink();
        Ok(matcher)
    }

    fn shrink(&mut self) {
        while self.bytes() > self.max_bytes {
            let oldest = self.bases.iter().min_by_key(|(_, base)| base.used);
            let Some(oldest) = oldest.map(|(key, _)| key.clone()) else { return };
            self.bases.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests;
