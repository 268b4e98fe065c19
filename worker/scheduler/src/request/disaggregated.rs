//! A running request that runs here in part.

use super::Running;
use crate::{
    launch::GraphRole,
    pages::PagePool,
    step::{Outcome, OutputToken, Reserved},
};

impl Running {
    /// Whether it gives up its pages to no one, since another worker fills them or takes them away.
    pub fn is_disaggregated(&self) -> bool {
        self.request.role != GraphRole::Whole
    }

    /// Whether another worker computes what it needs next.
    pub fn awaits_planes(&self) -> bool {
        self.request.role == GraphRole::Decode
    }

    /// Where another worker's prefill ends and what it sampled: from here on it runs here as if it always had. Nothing has
    /// changed if that cannot be; then the reason is given.
    pub fn import(&mut self, first: OutputToken, computed: usize, pool: &mut PagePool) -> Result<(), String> {
        let (end, request) = (self.request.prefill_end(), &mut self.request);
        if request.role != GraphRole::Decode {
            return Err("it waits for no planes".to_owned());
        }
        if computed != end {
            return Err(format!("planes of {computed} tokens are handed over, but its prefill has {end}"));
        }
        if first.index != request.generated {
            let due = request.generated;
            return Err(format!("token {} of its output is handed over, but {due} is due", first.index));
        }
        if !request.wants_output(first.index) || request.stopping.judge(first.token, first.index).is_some() {
            return Err(format!("it ends with token {}, which is handed over", first.token));
        }
        request.role = GraphRole::Whole;
        request.generated += 1;
        request.content.iter_mut().for_each(|content| content.tokens.push(first.token));
        self.computed = end;
        self.record(pool);
        Ok(())
    }

    /// The pages that another worker is to fill; none where no other does.
    pub fn reserved(&self, pool: &PagePool) -> Option<Reserved> {
        if !self.awaits_planes() {
            return None;
        }
        let tokens = self.request.prefill_end();
        let pages = self.block_table.pages()[..pool.pages_for(tokens)].to_vec();
        // Nothing else is recorded of it before it is handed over.
        Some(Reserved { key: self.request.key, pages, known: self.recorded, tokens })
    }

    /// Whether what it computes is no prefill.
    pub fn encodes(&self) -> bool {
        self.request.role == GraphRole::Encode
    }

    /// How it ends once its planes, or embeddings, are copied; none before its prefill is done.
    pub fn export_outcome(&self) -> Option<Outcome> {
        let prefilled = self.computed >= self.request.prefill_end() && !self.is_in_step();
        let done = prefilled && matches!(self.request.role, GraphRole::Prefill | GraphRole::Encode);
        done.then_some(Outcome::HandedOver { generated: self.request.generated })
    }
}
