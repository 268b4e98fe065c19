//! The scheduler's configuration.

use tutti_settings::{EngineSettings, Invalid, Settings};

/// The settings that the scheduler follows, and the bounds of its worker. Fixed for its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Budget and policies of a step. The pool's size is `pages`, not `kv_cache_memory`.
    pub settings: EngineSettings,
    /// The most requests that are held beyond those that may run.
    pub max_waiting_requests: usize,
    /// The most tokens of a request, prompt and output together.
    pub max_context: usize,
    /// Tokens per page.
    pub page_tokens: usize,
    /// Pages of the pool, the null page included.
    pub pages: usize,
}

/// A configuration under which nothing could run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A setting is out of its range.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The bound of this name is 0.
    #[error("{0}: is 0, but must be at least 1")]
    Zero(&'static str),
    /// The pool has no page besides the null page.
    #[error("the pool has {0} pages, but needs at least 2: the null page and one for requests")]
    PoolTooSmall(usize),
    /// The model has no walk to run a step as.
    #[error("the model declares no mixed walk")]
    NoMixedWalk,
}

impl SchedulerConfig {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        self.settings.check_ranges()?;
        let at_least_1 = [("max_context", self.max_context), ("page_tokens", self.page_tokens)];
        if let Some((name, _)) = at_least_1.iter().find(|(_, value)| *value == 0) {
            return Err(ConfigError::Zero(name));
        }
        if self.pages < 2 {
            return Err(ConfigError::PoolTooSmall(self.pages));
        }
        Ok(())
    }

    /// The most requests that run. They are no more than the budget has tokens, so that no decode misses a step and
    /// each prefill finds a token left.
    pub(crate) fn slots(&self) -> usize {
        self.settings.max_running_requests.min(self.settings.max_step_tokens)
    }

    /// The most tokens in one step of a prefill that is cut.
    pub(crate) fn max_chunk(&self) -> usize {
        self.settings.max_prefill_chunk_size.unwrap_or(usize::MAX).min(self.settings.max_step_tokens)
    }

    /// The most requests that are held, running and waiting.
    pub(crate) fn max_held_requests(&self) -> usize {
        self.settings.max_running_requests.saturating_add(self.max_waiting_requests)
    }
}
