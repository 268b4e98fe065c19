//! The scheduler's settings.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Bounds that the scheduler keeps, and the policies that it follows. Fixed for its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// The most tokens of one step. Only a prefill that must not be cut exceeds it, and then runs alone.
    pub max_step_tokens: usize,
    /// Whether prefills are cut to fit.
    pub chunking: Chunking,
    /// The most tokens of one prefill in one step, where prefills are cut; the step's budget when not given.
    pub max_prefill_chunk: Option<usize>,
    /// The same, in steps that others take part in.
    pub long_prefill_tokens: Option<usize>,
    /// How prefills share a step.
    pub prefill_sharing: PrefillSharing,
    /// How long a step that decodes should take at most; prefill beside decodes is cut to that.
    pub target_itl: Option<Duration>,
    /// What a request must hold before it runs.
    pub admission: Admission,
    /// Whether pages are kept for prompts that start alike.
    pub prefix_cache: bool,
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

/// Whether the scheduler cuts prefills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Chunking {
    /// Chunkable prefills are cut to what a step has left.
    #[default]
    Cut,
    /// Every prefill segment is atomic.
    Whole,
}

/// How the prefills of a step share what the decodes leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PrefillSharing {
    /// Half goes to the earliest request, so that it moves on whoever comes; the rest to whoever has least left, which
    /// makes the mean wait short.
    #[default]
    ShortestFirst,
    /// Equally, except that nobody gets more than is left of it: max-min fair.
    Fair,
    /// The earliest request takes what it can, then the next one.
    FirstCome,
}

/// What a request must hold before it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Admission {
    /// Pages for its prompt and all of `max_tokens`: nothing that runs ever waits for memory.
    #[default]
    WholeLife,
    /// Pages for its prefill and one token. Output takes pages as it grows; when there are none the last request in
    /// order gives up its own, and computes them again later.
    Optimistic,
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
    /// There is no walk to run a step as.
    #[error("the model declares no mixed walk")]
    NoMixedWalk,
}

impl SchedulerConfig {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let at_least_1 = [
            ("max_step_tokens", self.max_step_tokens),
            ("max_prefill_chunk_size", self.max_prefill_chunk.unwrap_or(1)),
            ("long_prefill_token_threshold", self.long_prefill_tokens.unwrap_or(1)),
            ("max_running_requests", self.max_running_requests),
            ("max_context", self.max_context),
            ("page_tokens", self.page_tokens),
        ];
        if let Some((name, _)) = at_least_1.iter().find(|(_, value)| *value == 0) {
            return Err(ConfigError::Zero(name));
        }
        if self.target_itl == Some(Duration::ZERO) {
            return Err(ConfigError::Zero("target_itl_ms"));
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

    /// The most tokens of a prefill that is cut in one step, whoever else is in it.
    pub(crate) fn max_chunk(&self) -> usize {
        self.max_prefill_chunk.unwrap_or(usize::MAX).min(self.max_step_tokens)
    }

    /// How many requests may be held, running and waiting.
    pub(crate) fn max_held_requests(&self) -> usize {
        self.max_running_requests.saturating_add(self.max_waiting_requests)
    }
}
