//! What the worker process tells its engine.

/// The engine's settings; bounds as in the flags of the same names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineSettings {
    /// The most tokens of one step; at most what the model was loaded for.
    pub max_step_tokens: usize,
    /// The most tokens of one prefill in one step; the step's budget when not given.
    pub max_prefill_chunk: Option<usize>,
    /// The most requests that hold KV pages at a time.
    pub max_running_requests: usize,
    /// How many requests may be held beyond those; a launch beyond that is refused as overload.
    pub max_waiting_requests: usize,
    /// Bytes of the KV pool. When not given: room for `max_running_requests` of full context, but at most
    /// [`DEFAULT_KV_BYTES`](crate::DEFAULT_KV_BYTES) and an eighth of the memory that is available.
    pub kv_cache_memory: Option<u64>,
}
