//! Memory that the largest step takes in addition to weights and KV pool.
//!
//! This memory is known at startup, without running such a step: device buffers have fixed sizes, and a step scores a
//! bounded number of prompt tokens with a bounded number of alternatives each. The requests' stored tokens are not
//! counted.

use tutti_kernels::TokenScore;
use tutti_models::Model;
use tutti_proto::{MAX_LOGPROBS, cluster::v1 as pb};
use tutti_settings::{Chunking, MediaPrefill};

use crate::EngineSettings;

/// Largest number of bytes that the allocator adds to a block.
const BLOCK_OVERHEAD: usize = 32;
/// Bytes of step inputs per prompt token, in the engine and on the device: id, position, logit row, requested results,
/// and a share of block tables and attention tiles.
const INPUT_BYTES_PER_TOKEN: usize = 128;
/// Number of copies of a step's scores in memory before the reports reach the outbox. The step that runs and a step
/// that waits have one copy each. The step that is being reported has two: as scores and as messages.
const STEPS_AT_ONCE: usize = 4;
/// Maximum ratio of capacity to content of a buffer that grows by doubling.
const GROWTH: usize = 2;

/// Largest number of bytes that steps take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepMemory {
    /// Bytes on the device: activations of the largest forward pass, one tile of logits, scratch.
    pub device: u64,
    /// Bytes on the host: inputs, and logprobs of prompt tokens for all steps whose reports are not sent yet.
    pub host: u64,
}

impl StepMemory {
    /// Returns the memory that steps of `model` take. The model must have run once. `longest` is the maximum number of
    /// tokens of a request. `waiting` is the maximum number of steps that wait to be reported or whose reports wait to
    /// be sent.
    pub fn of(model: &dyn Model, settings: &EngineSettings, longest: usize, waiting: usize) -> Self {
        let step = settings.max_padded_tokens();
        let has_atomic_media =
            settings.media_prefill == MediaPrefill::Atomic && !model.declaration().media().is_empty();
        let tokens = match settings.chunking {
            Chunking::Scheduler if !has_atomic_media => step,
            // One step can hold a whole prompt.
            _ => step.max(longest),
        };
        // The factor 2 before `GROWTH` stands for two messages: one is being encoded and one may be in transmission.
        let host =
            tokens * (INPUT_BYTES_PER_TOKEN + (STEPS_AT_ONCE + waiting) * scored() + 2 * GROWTH * encoded());
        Self { device: model.step_bytes(), host: host as u64 }
    }

    /// Sum of device and host bytes.
    pub fn total(self) -> u64 {
        self.device + self.host
    }
}

/// Bytes in memory of one prompt token's logprobs with the largest number of alternatives.
const fn scored() -> usize {
    let own = if size_of::<TokenScore>() > size_of::<pb::TokenLogprob>() {
        size_of::<TokenScore>()
    } else {
        size_of::<pb::TokenLogprob>()
    };
    GROWTH * own + MAX_LOGPROBS as usize * size_of::<pb::TopLogprob>() + BLOCK_OVERHEAD
}

/// Bytes on the wire of one prompt token's logprobs. A float takes a tag and four bytes; an id, a rank or a length
/// takes a tag and at most five.
const fn encoded() -> usize {
    let (float, number) = (1 + 4, 1 + 5);
    number + float + number + MAX_LOGPROBS as usize * (number + number + float)
}

#[cfg(test)]
mod tests;
