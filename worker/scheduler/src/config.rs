//! The scheduler's settings.

/// Bounds that the scheduler keeps. Fixed for its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// The most tokens of one step. Only an atomic segment that is larger exceeds it, and then runs alone.
    pub max_step_tokens: usize,
    /// The most tokens of one prefill in one step; the step's budget when not given.
    pub max_prefill_chunk: Option<usize>,
    /// The most requests that hold pages at a time; never more than `max_step_tokens` do.
    pub max_running_requests: usize,
    /// How many requests may be held beyond those that may run.
    pub max_waiting_requests: usize,
    /// The most tokens of a request, prompt and output together.
    pub max_context: usize,
    /// Tokens a page.
    pub page_tokens: usize,
    /// Pages of the pool, the null page included.
    pub pages: usize,
}

/// Settings under which nothing could run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A bound, named here, is 0.
    #[error("{0}: is 0, but must be at least 1")]
    Zero(&'static str),
    /// The null page needs another one beside it.
    #[error("the pool has {0} pages, but needs at least 2: the null page and one for requests")]
    PoolTooSmall(usize),
    /// This scheduler batches everything under one mixed walk.
    #[error("the model must declare exactly one mixed walk")]
    NotOneMixedWalk,
}

impl SchedulerConfig {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let at_least_1 = [
            ("max_step_tokens", self.max_step_tokens),
            ("max_prefill_chunk_size", self.max_prefill_chunk.unwrap_or(1)),
            ("max_running_requests", self.max_running_requests),
            ("max_context", self.max_context),
            ("page_tokens", self.page_tokens),
        ];
        if let Some((name, _)) = at_least_1.iter().find(|(_, value)| *value == 0) {
            return Err(ConfigError::Zero(name));
        }
        if self.pages < 2 {
            return Err(ConfigError::PoolTooSmall(self.pages));
        }
        Ok(())
    }

    /// How many requests may run. No more than the budget has tokens, so that no decode ever misses a step and whoever
    /// prefills always finds a token left.
    pub(crate) fn slots(&self) -> usize {
        self.max_running_requests.min(self.max_step_tokens)
    }

    /// How many requests may be held, running and waiting.
    pub(crate) fn max_held_requests(&self) -> usize {
        self.max_running_requests.saturating_add(self.max_waiting_requests)
    }
}
