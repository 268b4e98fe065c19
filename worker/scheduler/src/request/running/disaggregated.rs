//! A running request that shares its phases with another worker.

use super::Running;
use crate::{
    launch::GraphRole,
    pages::PagePool,
    step::{Outcome, OutputToken, Reserved},
};

impl Running {
    /// True if another worker fills or reads the request's pages, so that it gives them up to no other request.
    pub fn is_disaggregated(&self) -> bool {
        self.request.role != GraphRole::Whole
    }

    /// True if another worker computes the request's prefill.
    pub fn awaits_planes(&self) -> bool {
        self.request.role == GraphRole::Decode
    }

    /// Continues the request after another worker's prefill of `computed` tokens and its first sampled token. From here
    /// on the request runs like any other. On an error, which says why it cannot continue, nothing has changed.
    pub fn complete_import(
        &mut self,
        first: OutputToken,
        computed: usize,
        pool: &mut PagePool,
    ) -> Result<(), String> {
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
        if !request.wants_output(first.index) || request.stopping.finish(first.token, first.index).is_some() {
            return Err(format!("it ends with token {}, which is handed over", first.token));
        }
        request.role = GraphRole::Whole;
        request.generated += 1;
        request.content.iter_mut().for_each(|content| content.tokens.push(first.token));
        self.computed = end;
        self.record(pool);
        Ok(())
    }

    /// The pages that another worker fills. None unless the request awaits planes.
    pub fn reserved(&self, pool: &PagePool) -> Option<Reserved> {
        if !self.awaits_planes() {
            return None;
        }
        let tokens = self.request.prefill_end();
        let pages = self.block_table.pages()[..pool.pages_for(tokens)].to_vec();
        // Before the import is complete, only the blocks from the prefix cache are recorded.
        Some(Reserved { key: self.request.key, pages, known: self.recorded, tokens })
    }

    /// True if the request's rows encode media.
    pub fn encodes(&self) -> bool {
        self.request.role == GraphRole::Encode
    }

    /// The outcome of the request once its planes, or embeddings, are copied. None before its prefill is done.
    pub fn export_outcome(&self) -> Option<Outcome> {
        let prefilled = self.computed >= self.request.prefill_end() && !self.is_in_step();
        let done = prefilled && matches!(self.request.role, GraphRole::Prefill | GraphRole::Encode);
        done.then_some(Outcome::HandedOver { generated: self.request.generated })
    }
}
