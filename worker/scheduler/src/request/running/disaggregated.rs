//! A running request whose phases are divided between this worker and another.

use super::Running;
use crate::{
    holding::PlanePool,
    launch::GraphRole,
    step::{Outcome, OutputToken, Reserved},
};

impl Running {
    /// True if the request's phases are divided between two workers. Another worker fills or reads the request's pages,
    /// so the request is never preempted.
    pub fn is_disaggregated(&self) -> bool {
        self.request.role != GraphRole::Whole
    }

    /// True if another worker computes the request's prefill.
    pub fn awaits_planes(&self) -> bool {
        self.request.role == GraphRole::Decode
    }

    /// Completes the import: another worker has computed the planes of `computed` tokens and sampled the token `first`.
    /// From then on the request runs like any other. On an error the request is unchanged; the error says why the
    /// request cannot continue.
    pub fn complete_import(
        &mut self,
        first: OutputToken,
        computed: usize,
        pool: &mut PlanePool,
    ) -> Result<(), String> {
        let (end, request) = (self.prefill_end, &mut self.request);
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
        self.planned.computed = end;
        self.planned.generated = request.generated;
        self.record(pool);
        Ok(())
    }

    /// The pages that another worker fills. None if the request awaits no planes.
    pub fn reserved(&self, pool: &PlanePool) -> Option<Reserved> {
        if !self.awaits_planes() {
            return None;
        }
        let tokens = self.prefill_end;
        let pages = self.holding.table.pages()[..pool.pages().pages_for(tokens)].to_vec();
        // Until the import is complete, the recorded blocks are exactly those from the prefix cache.
        let (key, slot) = (self.request.key, self.holding.slot);
        Some(Reserved { key, pages, known: self.recorded, slot, tokens })
    }

    /// True if the request's rows encode media.
    pub fn encodes(&self) -> bool {
        self.request.role == GraphRole::Encode
    }

    /// The outcome with which the request ends once its planes or embeddings are copied to the other worker. None if
    /// its prefill is not done or if it exports nothing.
    pub fn export_outcome(&self) -> Option<Outcome> {
        let prefilled = self.computed >= self.prefill_end && !self.is_in_flight();
        let done = prefilled && matches!(self.request.role, GraphRole::Prefill | GraphRole::Encode);
        done.then_some(Outcome::HandedOver { generated: self.request.generated })
    }
}
