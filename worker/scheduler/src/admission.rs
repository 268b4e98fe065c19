//! The resources that a request holds from admission to its end, as a vector. A request is admitted when every
//! component is available.
//!
//! Every admission policy reserves the pages of the whole prefill at once, so that a pool never fills up with
//! half-prefilled requests that block each other. Scratch memory for activations and logits is bounded by the step
//! budget and is reserved at startup.

use tutti_settings::Admission;

use crate::{launch::Refusal, pages::PagePool};

/// An amount of each resource that can run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Slots of the running set.
    pub slots: usize,
    /// KV pages, shared ones included.
    pub pages: usize,
}

impl Needs {
    /// Needs of a request that may come to hold `tokens` tokens, over its whole life. Refused if the empty pool could
    /// not hold the request.
    pub fn of_whole_life(tokens: usize, pool: &PagePool) -> Result<Self, Refusal> {
        let (needed, total) = (pool.pages_for(tokens), pool.total());
        if needed > total {
            return Err(Refusal::PoolTooSmall { needed, total });
        }
        Ok(Self { slots: 1, pages: needed })
    }

    /// The share of these whole-life needs that a request with this prefill must hold before it runs.
    pub fn to_run(self, admission: Admission, prefill_tokens: usize, pool: &PagePool) -> Self {
        match admission {
            Admission::WholeLife => self,
            // The page of the first token is included. Without it a request could be admitted only to be preempted.
            Admission::Optimistic => {
                Self { pages: pool.pages_for(prefill_tokens + 1).min(self.pages), ..self }
            }
        }
    }
}
