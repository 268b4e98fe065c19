//! What a request holds from admission to its end, as a vector: it is admitted when every component is there.
//!
//! Pages are reserved for the whole life, prompt and `max_tokens`, so that nothing that runs ever waits for memory and
//! no pool fills up with half-prefilled requests.

use crate::{launch::Refusal, pages::PagePool};

/// One amount for each thing that can run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Places in the running set.
    pub slots: usize,
    /// KV pages.
    pub pages: usize,
}

impl Needs {
    /// For a request that may come to hold `tokens` tokens; refused if the pool could not hold it even alone.
    pub fn of_request(tokens: usize, pool: &PagePool) -> Result<Self, Refusal> {
        let (needed, total) = (pool.pages_for(tokens), pool.total());
        if needed > total {
            return Err(Refusal::PoolTooSmall { needed, total });
        }
        Ok(Self { slots: 1, pages: needed })
    }

    /// Whether all of it is there.
    pub fn fit_in(self, free: Self) -> bool {
        self.slots <= free.slots && self.pages <= free.pages
    }
}
