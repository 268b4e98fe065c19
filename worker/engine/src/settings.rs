//! What the worker process tells its engine.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tutti_scheduler::{Admission, PrefillSharing};

/// The engine's settings; bounds as in the flags of the same names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineSettings {
    /// The most tokens of one step; at most what the model was loaded for.
    pub max_step_tokens: usize,
    /// Who cuts long prefills.
    pub chunking: Chunking,
    /// The most tokens of one prefill in one forward; the step's budget when not given.
    pub max_prefill_chunk: Option<usize>,
    /// The most tokens of one prefill in a step that others take part in, where the scheduler cuts.
    pub long_prefill_tokens: Option<usize>,
    /// How prefills share a step.
    pub prefill_sharing: PrefillSharing,
    /// How long a step that decodes should take at most.
    pub target_itl: Option<Duration>,
    /// What a request must hold before it runs.
    pub admission: Admission,
    /// Whether pages are kept for prompts that start alike.
    pub prefix_cache: bool,
    /// The most requests that hold KV pages at a time.
    pub max_running_requests: usize,
    /// How many requests may be held beyond those; a launch beyond that is refused as overload.
    pub max_waiting_requests: usize,
    /// Bytes of the KV pool. When not given: room for `max_running_requests` of full context, but at most
    /// [`DEFAULT_KV_BYTES`](crate::DEFAULT_KV_BYTES) and an eighth of the memory that is available.
    pub kv_cache_memory: Option<u64>,
}

/// Who cuts long prefills. The tokens are the same whoever does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Chunking {
    /// The scheduler: each step mixes decodes and chunks under its budget.
    #[default]
    Scheduler,
    /// The engine: a prefill is one row of one step, and runs as forwards of `max_prefill_chunk` back to back.
    Engine,
    /// Nobody: as with the engine, in forwards as large as the model was loaded for.
    Off,
}

impl EngineSettings {
    /// These bounds, and every policy by its default.
    pub fn bounded(max_step_tokens: usize, max_running_requests: usize, max_waiting_requests: usize) -> Self {
        Self {
            max_step_tokens,
            chunking: Chunking::default(),
            max_prefill_chunk: None,
            long_prefill_tokens: None,
            prefill_sharing: PrefillSharing::default(),
            target_itl: None,
            admission: Admission::default(),
            prefix_cache: true,
            max_running_requests,
            max_waiting_requests,
            kv_cache_memory: None,
        }
    }

    /// The most tokens of a row in one forward.
    pub(crate) fn forward_tokens(&self) -> usize {
        match self.chunking {
            Chunking::Scheduler | Chunking::Off => self.max_step_tokens,
            Chunking::Engine => {
                self.max_prefill_chunk.unwrap_or(self.max_step_tokens).min(self.max_step_tokens)
            }
        }
    }
}
