//! The resources that a request holds from admission to its end, as a vector with one component per resource. A request
//! is admitted when all these resources are available.
//!
//! Every admission policy reserves all pages of the prefill at once. Otherwise half-prefilled requests could fill the
//! pool and block each other. Scratch memory for activations and logits is bounded by the step budget and is reserved
//! at startup.

use tutti_settings::Admission;

use crate::{launch::Refusal, pages::PagePool};

/// The amount of each limited resource that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Entries in the running set. The set has at most as many entries as a step's budget has tokens, so that every
    /// step has a token for each decode.
    pub running: usize,
    /// Pages, including shared pages.
    pub pages: usize,
    /// Slots. Every request has a slot. If the model has no planes in slots, the slot is only the request's index on
    /// the device.
    pub slots: usize,
}

impl Needs {
    /// Returns the needs of a request with at most `tokens` tokens over its whole life. Fails if even the empty pool
    /// could not hold the request.
    pub fn of_whole_life(tokens: usize, pool: &PagePool) -> Result<Self, Refusal> {
        let (needed, total) = (pool.pages_for(tokens), pool.total());
        if needed > total {
            return Err(Refusal::PoolTooSmall { needed, total });
        }
        Ok(Self { running: 1, pages: needed, slots: 1 })
    }

    /// The part of the needs that a request must hold before it runs. `self` is the request's needs over its whole
    /// life, and `prefill_tokens` is the length of the request's prefill.
    pub fn to_run(self, admission: Admission, prefill_tokens: usize, pool: &PagePool) -> Self {
        match admission {
            Admission::WholeLife => self,
            // The page of the first output token is included. Without that page, a request could be preempted as soon
            // as it is admitted.
            Admission::Optimistic => {
                Self { pages: pool.pages_for(prefill_tokens + 1).min(self.pages), ..self }
            }
        }
    }
}
