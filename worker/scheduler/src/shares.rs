//! Fair shares among callers: the share whose requests run next.
//!
//! Each share counts the tokens that it was given: the prefill tokens of its admitted requests, and its output tokens.
//! A request of the share with the fewest tokens is admitted next (deficit round robin with a quantum of one token, in
//! the form of virtual token counters: Sheng et al., Fairness in Serving Large Language Models, 2024). When a share
//! begins to wait, its count is raised to the level of the last admission. So a share gains no credit while it is idle.
//! Tokens that a share was given while no other share waited do not count against it later. Within a share, requests
//! keep the order of their arrival and priority.

use std::collections::BTreeMap;

/// The number of a share. All requests without an API key have number 0.
pub type ShareId = u64;

/// The shares that have requests, or whose count is above `level`.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    by_id: BTreeMap<ShareId, Share>,
    /// The largest token count that any share had when one of its requests was admitted.
    level: u64,
    admissions: u64,
}

#[derive(Debug, Default)]
struct Share {
    /// Number of requests that are held.
    held: usize,
    /// Number of tokens that the share was given.
    given: u64,
    /// Serial number of the share's last admission; 0 before the first.
    last_admission: u64,
    /// Serial number of the last step that computed a prefill of the share, plus 1.
    last_prefill: u64,
}

impl Shares {
    /// Counts a request that arrives.
    pub fn arrive(&mut self, share: ShareId) {
        let level = self.level;
        let state = self.by_id.entry(share).or_default();
        if state.held == 0 {
            state.given = state.given.max(level);
        }
        state.held += 1;
    }

    /// Counts a request that has ended.
    pub fn leave(&mut self, share: ShareId) {
        if let Some(state) = self.by_id.get_mut(&share) {
            state.held -= 1;
        }
        let level = self.level;
        self.by_id.retain(|_, state| state.held > 0 || state.given > level);
    }

    /// Raises the count of a share that begins to wait to at least `level`.
    pub fn wait(&mut self, share: ShareId) {
        let level = self.level;
        self.by_id.entry(share).and_modify(|state| state.given = state.given.max(level));
    }

    /// Sort key of the order in which shares are admitted, lowest first.
    pub fn turn(&self, share: ShareId) -> (u64, u64) {
        self.by_id.get(&share).map_or((0, 0), |state| (state.given, state.last_admission))
    }

    /// Counts an admitted request. `prefill` is the number of prefill tokens that the request computes.
    pub fn admit(&mut self, share: ShareId, prefill: u64) {
        self.admissions += 1;
        if let Some(state) = self.by_id.get_mut(&share) {
            self.level = self.level.max(state.given);
            state.given += prefill;
            state.last_admission = self.admissions;
        }
    }

    /// Takes back the prefill tokens that a preempted request has not computed. Its next admission counts them again.
    pub fn take_back(&mut self, share: ShareId, tokens: u64) {
        if let Some(state) = self.by_id.get_mut(&share) {
            state.given = state.given.saturating_sub(tokens);
        }
    }

    /// True if requests of more than one share are held.
    pub fn are_several(&self) -> bool {
        self.by_id.values().filter(|state| state.held > 0).nth(1).is_some()
    }

    /// Counts a token of output.
    pub fn output(&mut self, share: ShareId) {
        if let Some(state) = self.by_id.get_mut(&share) {
            state.given += 1;
        }
    }

    /// Records that the step with number `step` computes a prefill of the share.
    pub fn prefill(&mut self, share: ShareId, step: u64) {
        if let Some(state) = self.by_id.get_mut(&share) {
            state.last_prefill = step + 1;
        }
    }

    /// Sort key of the order in which shares get their parts of a step, lowest first. The share without a prefill for
    /// longest comes first.
    pub fn prefill_turn(&self, share: ShareId) -> u64 {
        self.by_id.get(&share).map_or(0, |state| state.last_prefill)
    }
}

#[cfg(test)]
mod tests;
