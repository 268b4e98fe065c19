//! The constraint of one request: its matcher, and the mask of its next token.

use std::{
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use tutti_constraints::{Canonical, Constraint, ConstraintError, Matcher, Thinking};
use tutti_kernels::TokenMask;
use tutti_proto::{GraphKey, cluster::v1 as pb};
use tutti_scheduler::{ConstraintFailure, FailureCause};

use super::{budget::ThinkingBudget, environments::MoreSpecial, memory::MatcherMemory};

/// The constraint of one request, which its [`Sequence`](crate::sequence::Sequence) holds. Clones are the same guide.
#[derive(Clone)]
pub(crate) struct Guide(Arc<Cell>);

/// The parts of a guide that both the engine and the pool use.
struct Cell {
    key: GraphKey,
    constraint: Option<Constraint>,
    /// The key of the constraint among compiled ones.
    canonical: Option<Canonical>,
    /// Tokens that end this request alone, each once. They may come where the text may end.
    stop_tokens: Vec<u32>,
    /// Number of tokens in the vocabulary.
    vocabulary: usize,
    state: Mutex<State>,
    /// Signalled when the next mask is no longer pending.
    changed: Condvar,
    memory: OnceLock<Arc<MatcherMemory>>,
}

struct State {
    /// Number of output tokens that the next mask is behind.
    generated: usize,
    /// `None` while the pool uses it, before it is compiled, and for a request without a constraint.
    matcher: Option<Matcher>,
    budget: Option<ThinkingBudget>,
    next: Next,
    /// True if the pool must say when the next mask is no longer pending.
    is_awaited: bool,
    /// Duration of the pool's last work for this guide.
    took: Duration,
    /// Bytes of the matcher, as far as they are counted.
    bytes: usize,
    /// True once the request has ended.
    has_ended: bool,
}

/// The next token's mask.
#[derive(Clone, Debug)]
pub(crate) enum Next {
    /// The pool has not made it yet.
    Pending,
    /// It is ready.
    Ready(NextMask),
    /// No token can follow: the output is complete.
    Complete,
    /// The constraint cannot be followed.
    Failed(ConstraintFailure),
}

/// A mask that is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NextMask {
    /// `None` allows all tokens.
    pub mask: Option<TokenMask>,
    /// Hash of the mask, by which rows with equal masks find each other.
    pub hash: u64,
    /// True if every allowed token ends the request: an end token or one of its own stop tokens. `min_tokens` does not
    /// hold then.
    pub only_ends: bool,
}

impl NextMask {
    /// The mask that allows all tokens.
    pub const ALL: Self = Self { mask: None, hash: 0, only_ends: false };

    fn new(mask: TokenMask, only_ends: bool) -> Self {
        Self { hash: hash(mask.words()), mask: Some(mask), only_ends }
    }
}

/// A hash of a mask's words. It takes a few microseconds, less than the mask. Masks with one hash are compared.
fn hash(words: &[u32]) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    words.iter().fold(FACTOR, |hash, &word| (hash ^ u64::from(word)).wrapping_mul(FACTOR).rotate_left(23))
}

/// The request's part of a guide.
pub(crate) struct Guided<'a> {
    pub key: GraphKey,
    pub constraint: Option<Constraint>,
    pub thinking: Option<&'a pb::Thinking>,
    /// Output of earlier incarnations.
    pub generated: &'a [u32],
    pub stop_tokens: &'a [u32],
    /// Number of tokens in the vocabulary.
    pub vocabulary: usize,
}

impl Guide {
    /// The guide of a request; `None` if all its tokens are free. A guide with a constraint begins to work once the
    /// pool [opens](super::Masks::open) it.
    pub fn of(guided: Guided<'_>) -> Option<Self> {
        let Guided { key, constraint, thinking, generated, stop_tokens, vocabulary } = guided;
        let mut budget = thinking.and_then(ThinkingBudget::of);
        if let Some(budget) = &mut budget {
            generated.iter().for_each(|&token| budget.commit(token));
        }
        if constraint.is_none() && budget.is_none() {
            return None;
        }
        let next = match constraint {
            Some(_) => Next::Pending,
            None => Next::Ready(of_budget(budget.as_ref(), stop_tokens, vocabulary)),
        };
        let mut stop_tokens = stop_tokens.to_vec();
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        let state = State {
            generated: generated.len(),
            matcher: None,
            budget,
            next,
            is_awaited: false,
            took: Duration::ZERO,
            bytes: 0,
            has_ended: false,
        };
        Some(Self(Arc::new(Cell {
            key,
            canonical: constraint.as_ref().map(Constraint::canonical),
            constraint,
            stop_tokens,
            vocabulary,
            state: Mutex::new(state),
            changed: Condvar::new(),
            memory: OnceLock::new(),
        })))
    }

    pub fn key(&self) -> GraphKey {
        self.0.key
    }

    /// The constraint. A guide without one has only a budget for thinking, and its masks need no pool.
    pub fn constraint(&self) -> Option<&Constraint> {
        self.0.constraint.as_ref()
    }

    /// The key of the constraint among compiled ones.
    pub fn canonical(&self) -> Option<&Canonical> {
        self.0.canonical.as_ref()
    }

    /// The special tokens of the constraint, besides those of the tokenizer.
    pub(super) fn special(&self) -> MoreSpecial {
        let Some(constraint) = &self.0.constraint else { return MoreSpecial::Thinking(Vec::new()) };
        // The tokens of a thinking block are added tokens.
        if constraint.names_tokens() {
            return MoreSpecial::Added;
        }
        MoreSpecial::Thinking(match constraint.thinking {
            Thinking::Closed => Vec::new(),
            Thinking::Open { end } => vec![end],
            Thinking::Optional { begin, end } => vec![begin, end],
        })
    }

    /// Waits until the mask of the output's token `index` is ready, at most until `until`.
    pub fn wait(&self, index: usize, until: Instant) -> Next {
        let mut state = self.lock();
        while matches!(state.next, Next::Pending) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Next::Pending;
            }
            state = self.0.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        match state.generated == index {
            true => state.next.clone(),
            // A mask of another token would give an answer that does not follow the constraint.
            false => Next::Failed(ConstraintFailure {
                cause: FailureCause::Worker,
                why: format!("the mask of token {} is there, but token {index} is sampled", state.generated),
            }),
        }
    }

    /// The next mask as it is now. If it is pending, the pool says when it no longer is.
    pub fn next_or_await(&self) -> Next {
        let mut state = self.lock();
        state.is_awaited = matches!(state.next, Next::Pending);
        state.next.clone()
    }

    /// True if the pool's last work for this guide took at least `limit`.
    pub fn took_at_least(&self, limit: Duration) -> bool {
        self.lock().took >= limit
    }

    /// Makes the pool say when the next mask is no longer pending. False if it is not pending now.
    pub fn await_next(&self) -> bool {
        let mut state = self.lock();
        state.is_awaited = matches!(state.next, Next::Pending);
        state.is_awaited
    }

    /// Advances by a token of the output. Returns true if the pool must make the next mask.
    pub fn begin_advance(&self, token: u32) -> bool {
        let mut state = self.lock();
        state.generated += 1;
        if let Some(budget) = &mut state.budget {
            budget.commit(token);
        }
        if self.constraint().is_none() {
            state.next =
                Next::Ready(of_budget(state.budget.as_ref(), &self.0.stop_tokens, self.0.vocabulary));
            return false;
        }
        state.next = Next::Pending;
        true
    }

    /// Takes the matcher for work in the pool.
    pub(super) fn take_matcher(&self) -> Option<Matcher> {
        self.lock().matcher.take()
    }

    /// Gives a matcher back between two parts of the pool's work.
    pub(super) fn give_back(&self, matcher: Option<Matcher>) {
        self.lock().matcher = matcher;
    }

    /// Records that the request has ended, so that the pool begins no further part of its work.
    pub(super) fn end(&self) {
        self.lock().has_ended = true;
    }

    /// True once the request has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.lock().has_ended
    }

    /// Makes the next mask with a matcher that is behind all tokens. Only the pool calls it.
    pub(super) fn next_of(&self, matcher: &mut Matcher) -> Result<Next, ConstraintError> {
        let words = TokenMask::words_of(self.0.vocabulary);
        let mut mask = vec![0; words.max(matcher.mask_words())];
        let allowed = matcher.mask(&mut mask)?;
        mask.truncate(words);
        if let Some(last) = mask.last_mut()
            && !self.0.vocabulary.is_multiple_of(32)
        {
            *last &= (1 << (self.0.vocabulary % 32)) - 1;
        }
        let is_set =
            |token: u32| mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1);
        let stops = self.0.stop_tokens.iter().filter(|&&token| is_set(token) && !matcher.is_end(token));
        // The text may need a token that ends the request. Where nothing else may follow, the request ends there.
        let only_ends = stops.count() as u32 == allowed.others();
        let closes_with = self.lock().budget.as_ref().and_then(ThinkingBudget::closes_with);
        if let Some(end) = closes_with {
            // Inside a character the block cannot end yet.
            let only_end = TokenMask::of_tokens(words, [end]);
            if mask.iter().zip(only_end.words()).any(|(allowed, end)| allowed & end != 0) {
                return Ok(Next::Ready(NextMask::new(only_end, self.0.stop_tokens.contains(&end))));
            }
        }
        for &token in self.0.stop_tokens.iter().filter(|_| allowed.may_end) {
            if let Some(word) = mask.get_mut(token as usize / 32) {
                *word |= 1 << (token % 32);
            }
        }
        Ok(Next::Ready(NextMask::new(TokenMask::new(mask), only_ends)))
    }

    /// Gives the result of the pool's work back. Returns true if the engine waits for it.
    pub(super) fn finish_work(&self, matcher: Option<Matcher>, next: Next, took: Duration) -> bool {
        let mut state = self.lock();
        state.matcher = matcher;
        state.next = next;
        state.took = took;
        let is_awaited = std::mem::take(&mut state.is_awaited);
        drop(state);
        self.0.changed.notify_all();
        is_awaited
    }

    /// Counts the bytes of the matcher. An error if all matchers together take too many, and this one more than its
    /// part.
    pub(super) fn count_bytes(
        &self,
        matcher: &Matcher,
        memory: &Arc<MatcherMemory>,
    ) -> Result<(), ConstraintFailure> {
        let memory = self.0.memory.get_or_init(|| {
            memory.enter();
            Arc::clone(memory)
        });
        let bytes = matcher.bytes();
        let before = std::mem::replace(&mut self.lock().bytes, bytes);
        let changed = memory.change(before, bytes);
        changed.map_err(|why| ConstraintFailure { cause: FailureCause::Memory, why })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The mask of a request without a constraint.
fn of_budget(budget: Option<&ThinkingBudget>, stop_tokens: &[u32], vocabulary: usize) -> NextMask {
    match budget.and_then(ThinkingBudget::closes_with) {
        Some(end) => {
            let only_end = TokenMask::of_tokens(TokenMask::words_of(vocabulary), [end]);
            NextMask::new(only_end, stop_tokens.contains(&end))
        }
        None => NextMask::ALL,
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = self.memory.get() {
            memory.leave(state.bytes, state.matcher.take());
        }
    }
}

impl PartialEq for Guide {
    fn eq(&self, other: &Self) -> bool {
        let same = |a: &State, b: &State| a.generated == b.generated && a.budget == b.budget;
        Arc::ptr_eq(&self.0, &other.0)
            || self.0.constraint == other.0.constraint && same(&self.lock(), &other.lock())
    }
}

impl fmt::Debug for Guide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guide").field("constraint", &self.0.constraint).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
