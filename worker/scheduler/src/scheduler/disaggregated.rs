//! Requests that run here in role: prefilled for another worker, or decoded after another worker's prefill.
//!
//! The scheduler moves no planes. It is told when they have come or gone, or never will.

use std::collections::btree_map::Entry;

use tutti_proto::GraphKey;

use super::{Scheduler, forget};
use crate::{
    request::Running,
    step::{Ending, OutputToken, TransferError},
};

impl Scheduler {
    /// All planes of a request that was [reserved](crate::Reserved) stand in its pages: it goes on behind them, with the
    /// token that was sampled after `computed` others. An error says why it cannot; then nothing has changed.
    pub fn complete_import(
        &mut self,
        key: GraphKey,
        first: OutputToken,
        computed: usize,
    ) -> Result<(), String> {
        let ticket = self.tickets.get(&key).copied();
        let Some(request) = ticket.and_then(|ticket| self.running.get_mut(&ticket)) else {
            return Err("it holds no pages here".to_owned());
        };
        request.import(first, computed, &mut self.pool)
    }

    /// The embeddings of a request's media are here: from now on it waits like any other, in the place that it came to.
    /// False if it waits for none.
    pub fn media_here(&mut self, key: GraphKey) -> bool {
        let Some(&ticket) = self.tickets.get(&key) else { return false };
        let Some(mut request) = self.parked.remove(&ticket) else { return false };
        request.awaits_media = false;
        self.waiting.insert(ticket, request);
        true
    }

    /// The planes of a request that was prefilled for another worker are copied, and its pages are free. None if it has
    /// ended before, or its prefill is not done.
    pub fn complete_export(&mut self, key: GraphKey) -> Option<Ending> {
        let Entry::Occupied(request) = self.running.entry(*self.tickets.get(&key)?) else { return None };
        let outcome = request.get().export_outcome()?;
        let request = request.remove();
        forget(&mut self.tickets, &mut self.deadlines, key, request.deadline());
        Some(request.end(outcome, &mut self.pool))
    }

    /// Whether a request is left out of steps, because its planes leave more slowly than it computes them.
    pub fn hold_back(&mut self, key: GraphKey, held_back: bool) {
        if let Some(request) = self.running_mut(key) {
            request.held_back = held_back;
        }
    }

    /// The planes of a request will never come, or never leave: it ends at the head of the next plan, or as soon after as
    /// no step computes it. Does nothing for one that is not here.
    pub fn fail_transfer(&mut self, key: GraphKey, why: TransferError) {
        if self.tickets.contains_key(&key) {
            self.failed_transfers.insert(key, why);
        }
    }

    fn running_mut(&mut self, key: GraphKey) -> Option<&mut Running> {
        self.running.get_mut(self.tickets.get(&key)?)
    }
}
