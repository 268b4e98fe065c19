//! The scheduler's configuration: settings, and the limits of its worker.

use tutti_settings::{EngineSettings, Invalid, Settings};

/// The settings that a scheduler follows, and the limits of its worker. Both are fixed for the scheduler's life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// The budget and the policies of a step. `kv_cache_memory` is not used here, because the field `pages` gives the
    /// size of the pool.
    pub settings: EngineSettings,
    /// Maximum number of requests that the scheduler holds in addition to the settings' `max_running_requests`.
    pub max_waiting_requests: usize,
    /// Maximum number of tokens of a request, prompt and output together.
    pub max_context: usize,
    /// Tokens per page.
    pub page_tokens: usize,
    /// Pages of the pool, the null page included.
    pub pages: usize,
    /// Slots of the pool, the null slot included. Each running request holds one slot. The other slots hold snapshots
    /// of the prefix cache, if the model has planes in slots.
    pub slots: usize,
    /// Maximum number of steps that are planned and not yet committed or aborted.
    pub steps_in_flight: usize,
}

/// The reason for which a configuration is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A setting is out of its range.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The limit of this name is 0.
    #[error("{0}: is 0, but must be at least 1")]
    Zero(&'static str),
    /// The pool has no page besides the null page.
    #[error("the pool has {0} pages, but needs at least 2: the null page and one for requests")]
    PoolTooSmall(usize),
    /// The pool has no slot besides the null slot.
    #[error("the pool has {0} slots, but needs at least 2: the null slot and one for requests")]
    TooFewSlots(usize),
    /// The model declares no mixed walk, but a step with a prefill must run as a mixed walk.
    #[error("the model declares no mixed walk")]
    NoMixedWalk,
}

impl SchedulerConfig {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        self.settings.check_ranges()?;
        let at_least_1 = [
            ("max_context", self.max_context),
            ("page_tokens", self.page_tokens),
            ("steps_in_flight", self.steps_in_flight),
        ];
        if let Some((name, _)) = at_least_1.iter().find(|(_, value)| *value == 0) {
            return Err(ConfigError::Zero(name));
        }
        if self.pages < 2 {
            return Err(ConfigError::PoolTooSmall(self.pages));
        }
        if self.slots < 2 {
            return Err(ConfigError::TooFewSlots(self.slots));
        }
        Ok(())
    }

    /// Maximum number of running requests. It is at most the token budget of a step, so that every step has a token for
    /// each decode and at least one more if any request prefills.
    pub(crate) fn max_running(&self) -> usize {
        self.settings.running_limit().min(self.settings.max_step_tokens)
    }

    /// Maximum number of tokens of one prefill that a step computes, if the prefill may be cut.
    pub(crate) fn max_chunk(&self) -> usize {
        self.settings.max_prefill_chunk_size.unwrap_or(usize::MAX).min(self.settings.max_step_tokens)
    }

    /// Maximum number of requests held, running and waiting together.
    pub(crate) fn max_held_requests(&self) -> usize {
        self.settings.running_limit().saturating_add(self.max_waiting_requests)
    }
}
