//! What the largest step takes, beside weights and KV pool.
//!
//! Known at startup, without running such a step: device buffers have fixed sizes, and a step scores so many prompt
//! tokens at most, each with so many alternatives. What requests themselves hold (their tokens) is not in it.

use tutti_kernels::TokenScore;
use tutti_models::Model;
use tutti_proto::cluster::v1 as pb;

use crate::{Chunking, EngineSettings, spec::MAX_LOGPROBS};

/// Bytes that the allocator adds to a block, at most.
const BLOCK_OVERHEAD: usize = 32;
/// Bytes of a prompt token among a step's inputs, in the engine and on the device: id, position, logit row, what is
/// wanted of it, and its share of block tables and attention's tiles.
const INPUT: usize = 128;
/// Steps whose scores are in memory at once before their report is in the outbox: the one that runs, one that waits to
/// be reported, and one that is, as scores and as messages.
const STEPS_AT_ONCE: usize = 4;
/// How much larger a buffer that grows by doubling is than what it holds.
const GROWTH: usize = 2;

/// The most bytes that steps take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepMemory {
    /// On the device: activations of the largest forward, one tile of logits, scratch.
    pub device: u64,
    /// CopyHook it: inputs, and the logprobs of all prompt tokens that steps can score, until their reports are sent.
    pub host: u64,
}

impl StepMemory {
    /// Of a model that has run once. `longest` is the most tokens of a request, `waiting` the most steps that wait to be
    /// reported or whose reports wait to be sent.
    pub fn of(model: &dyn Model, settings: &EngineSettings, longest: usize, waiting: usize) -> Self {
        let tokens = match settings.chunking {
            Chunking::Scheduler => settings.max_step_tokens,
            // A step of one prompt is as long as the prompt.
            Chunking::Engine | Chunking::Off => settings.max_step_tokens.max(longest),
        };
        // One message is being encoded, and one may be on its way out.
        let host = tokens * (INPUT + (STEPS_AT_ONCE + waiting) * scored() + 2 * GROWTH * encoded());
        Self { device: model.step_bytes(), host: host as u64 }
    }

    /// All of it.
    pub fn total(self) -> u64 {
        self.device + self.host
    }
}

/// Bytes of one prompt token's logprobs in memory, with as many alternatives as a request may ask for.
const fn scored() -> usize {
    let own = if size_of::<TokenScore>() > size_of::<pb::TokenLogprob>() {
        size_of::<TokenScore>()
    } else {
        size_of::<pb::TokenLogprob>()
    };
    GROWTH * own + MAX_LOGPROBS as usize * size_of::<pb::TopLogprob>() + BLOCK_OVERHEAD
}

/// The same on the wire: a tag and four bytes for each float, a tag and at most five for each id, rank and length.
const fn encoded() -> usize {
    let (float, number) = (1 + 4, 1 + 5);
    number + float + number + MAX_LOGPROBS as usize * (number + number + float)
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    #[test]
    fn a_token_takes_no_more_on_the_wire_than_is_counted() {
        let top = pb::TopLogprob { token_id: u32::MAX, logprob: f32::MIN };
        let token =
            pb::TokenLogprob { logprob: f32::MIN, rank: u32::MAX, top: vec![top; MAX_LOGPROBS as usize] };
        let one = pb::PromptLogprobs { first: 0, tokens: vec![token] };
        assert!(one.encoded_len() <= encoded(), "{} of {}", one.encoded_len(), encoded());
        assert!(
            one.encoded_len() * 2 > encoded(),
            "nor is far more counted: {} of {}",
            one.encoded_len(),
            encoded()
        );
    }
}
