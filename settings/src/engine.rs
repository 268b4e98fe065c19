//! The engine and its scheduler: the budget of a step, its division among requests, and the memory of requests.

use std::time::Duration;

use crate::{ByteSize, ChunkShapes, Invalid};

settings! {
    /// Settings of a worker's engine and of the scheduler in it.
    pub struct EngineSettings {
        "Scheduling" => {
            /// Token budget of one step, over all its requests
            max_step_tokens: usize = 512, unit "TOKENS", at least 1, at most 1 << 20;
            /// Component that cuts long prompts into chunks
            chunking: Chunking = Chunking::Scheduler;
            /// Limit of one prompt's chunk in one forward
            max_prefill_chunk_size: Option<usize> = None, unit "TOKENS", default "max-step-tokens", at least 1;
            /// Fixed token counts to which steps are padded, for devices with compiled graphs, such as 64,256,1024
            chunk_shapes: Option<ChunkShapes> = None, unit "TOKENS,...", default "none";
            /// Fixed token counts to which calls of encoders of media are padded, for devices with compiled graphs
            encoder_shapes: Option<ChunkShapes> = None, unit "TOKENS,...", default "none";
            /// Limit of a chunk in a step with other requests, if the scheduler cuts
            long_prefill_token_threshold: Option<usize> = None, unit "TOKENS", default "max-prefill-chunk-size", at least 1;
            /// Division among prompts of what decodes leave of a step
            prefill_sharing: PrefillSharing = PrefillSharing::ShortestFirst;
            /// Target for the time between two tokens; prompts get what decodes leave of it
            target_itl_ms: Option<u32> = None, unit "MS", default "none", at least 1;
            /// Prefills of prompts with pictures, recordings or videos: cut like those of texts, or each whole in one
            /// step
            media_prefill: MediaPrefill = MediaPrefill::Chunked;
            /// KV pages that a request must hold before it runs
            admission: Admission = Admission::WholeLife;
            /// Requests that one worker runs at a time
            max_running_requests: Option<usize> = None, unit "N",
                default "128, or as many as half of the planes' memory holds slots for", at least 1, at most 1 << 16;
        }
        "Device and memory" => {
            /// Memory for the KV pages and state slots of each worker, such as 512MiB or 2GB; a CPU worker allocates it
            /// at its start
            kv_cache_memory: Option<ByteSize> = None, unit "SIZE",
                default "as needed, at most what weights leave of its share of 7/8 of free memory";
            /// Type of the elements of KV pages
            kv_cache_dtype: KvCacheDtype = KvCacheDtype::Auto;
            /// Host memory of each worker for embeddings of media that it has encoded, the least recently used of which
            /// make room for others; 0 keeps none
            encoder_cache_memory: ByteSize = ByteSize(256 << 20), unit "SIZE_OR_0";
            /// Host memory of each worker for embeddings of requests whose prefill is not over; further requests wait,
            /// and a request with more waits until it is the only one
            embedding_memory: ByteSize = ByteSize(256 << 20), unit "SIZE";
            /// Do not keep KV pages for prompts that begin alike
            no_prefix_cache: bool = false;
        }
    }
}

/// Requests that one worker runs at a time if `max_running_requests` is not set, and slots do not limit them further.
pub const DEFAULT_RUNNING_REQUESTS: usize = 128;

impl EngineSettings {
    /// Maximum number of requests that one worker runs at a time: `max_running_requests`, or its default.
    pub fn running_limit(&self) -> usize {
        self.max_running_requests.unwrap_or(DEFAULT_RUNNING_REQUESTS)
    }

    /// `target_itl_ms` as a duration: the target for the duration of a step with decodes.
    pub fn target_itl(&self) -> Option<Duration> {
        self.target_itl_ms.map(|ms| Duration::from_millis(ms.into()))
    }

    /// Maximum number of tokens that a device computes in a step, padding included. Buffers have this size.
    pub fn max_padded_tokens(&self) -> usize {
        self.max_step_tokens.max(self.chunk_shapes.as_ref().map_or(0, ChunkShapes::greatest))
    }

    /// Refuses fixed shapes if even the greatest is smaller than a step's token budget.
    pub fn check_chunk_shapes(&self) -> Result<(), Invalid> {
        let Some(shapes) = &self.chunk_shapes else { return Ok(()) };
        let (greatest, budget) = (shapes.greatest(), self.max_step_tokens);
        if budget <= greatest {
            return Ok(());
        }
        let message =
            format!("has no shape above {greatest}, but a step has up to {budget} tokens (max_step_tokens)");
        Err(Invalid::new("chunk_shapes", message))
    }
}

choices! {
    /// The component that cuts long prefills. The sampled tokens do not depend on this choice.
    pub enum Chunking {
        /// The scheduler: each step mixes decodes and prefill chunks under its budget.
        Scheduler = "scheduler",
        /// The engine: a prefill is one row of one step, run as forwards of `max_prefill_chunk_size` back to back.
        Engine = "engine",
        /// No component: a prefill is one row of one step. A prefill that is larger than the budget runs alone.
        Off = "off",
    }
}

choices! {
    /// How prefills share the part of a step that decodes do not use.
    pub enum PrefillSharing {
        /// Half goes to the earliest request, so that none starves. The rest goes to the request with the least left to
        /// prefill, which makes the mean wait short.
        ShortestFirst = "shortest-first",
        /// Equal shares. What a short prefill leaves of its share goes to the others (max-min fairness).
        Fair = "fair",
        /// The earliest request takes as many tokens as it needs, then the next request does.
        FirstCome = "first-come",
    }
}

choices! {
    /// How prompts with media are prefilled. The sampled tokens do not depend on this choice.
    pub enum MediaPrefill {
        /// As those of texts: `chunking` says where they are cut, also inside a picture.
        Chunked = "chunked",
        /// Each is one row of one step. A prompt that is larger than the budget runs alone.
        Atomic = "atomic",
    }
}

choices! {
    /// The KV pages that a request must hold before it runs.
    pub enum Admission {
        /// Pages for its prompt and all of `max_tokens`: a running request never waits for memory.
        WholeLife = "whole-life",
        /// Pages for its prompt and one token. Output takes pages as it grows. When none is free, the request that is
        /// last in order gives up its pages and computes them again later.
        Optimistic = "optimistic",
    }
}

choices! {
    /// The type in which pages store keys and values.
    pub enum KvCacheDtype {
        /// The type of the checkpoint's embedding.
        Auto = "auto",
        /// bfloat16.
        Bf16 = "bf16",
        /// Floats of eight bits (e4m3) with the checkpoint's scales, or without scales if it has none: half the memory
        /// of bf16.
        Fp8 = "fp8",
    }
}
