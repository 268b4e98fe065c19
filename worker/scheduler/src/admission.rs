//! What a request holds from admission to its end, as a vector: it is admitted when every component is there.
//!
//! Pages for the whole prefill are reserved at once in every mode, so that no pool fills up with half-prefilled requests
//! of which none can go on. What activations and logits need is bounded by the step's budget and reserved at startup.

use tutti_settings::Admission;

use crate::{launch::Refusal, pages::PagePool};

/// One amount for each thing that can run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Places in the running set.
    pub slots: usize,
    /// KV pages, shared ones included.
    pub pages: usize,
}

impl Needs {
    /// Of a request that may come to hold `tokens` tokens, over its whole life; refused if the pool could not hold it
    /// even alone.
    pub fn of_whole_life(tokens: usize, pool: &PagePool) -> Result<Self, Refusal> {
        let (needed, total) = (pool.pages_for(tokens), pool.total());
        if needed > total {
            return Err(Refusal::PoolTooSmall { needed, total });
        }
        Ok(Self { slots: 1, pages: needed })
    }

    /// What of its life's needs a request with this prefill must hold before it runs.
    pub fn to_run(self, admission: Admission, prefill_tokens: usize, pool: &PagePool) -> Self {
        match admission {
            Admission::WholeLife => self,
            // The first token's page too, or the request could be admitted only to be preempted.
            Admission::Optimistic => {
                Self { pages: pool.pages_for(prefill_tokens + 1).min(self.pages), ..self }
            }
        }
    }
}
