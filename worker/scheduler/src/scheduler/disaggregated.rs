//! Requests that share their phases with another worker: prefilled for it, or decoded after its prefill.
//!
//! The scheduler moves no planes. The engine reports when a transfer is complete or has failed.

use std::collections::btree_map::Entry;

use tutti_proto::GraphKey;

use super::{Scheduler, forget};
use crate::{
    request::Running,
    step::{Ending, OutputToken, TransferError},
};

impl Scheduler {
    /// Continues a request whose [reserved](crate::Reserved) pages are filled, after a prefill of `computed` tokens and
    /// its first sampled token. On an error, which says why it cannot continue, nothing has changed.
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
        request.complete_import(first, computed, &mut self.pool)
    }

    /// Queues a request once the embeddings of its media are here. It keeps its position in the order. False if it
    /// waits for no embeddings.
    pub fn media_here(&mut self, key: GraphKey) -> bool {
        let Some(&ticket) = self.tickets.get(&key) else { return false };
        let Some(mut request) = self.parked.remove(&ticket) else { return false };
        request.awaits_media = false;
        self.waiting.insert(ticket, request);
        true
    }

    /// Ends a request that was prefilled for another worker, once its planes are copied, and frees its pages. None if
    /// it has ended before or its prefill is not done.
    pub fn complete_export(&mut self, key: GraphKey) -> Option<Ending> {
        let Entry::Occupied(request) = self.running.entry(*self.tickets.get(&key)?) else { return None };
        let outcome = request.get().export_outcome()?;
        let request = request.remove();
        forget(&mut self.tickets, &mut self.deadlines, key, request.deadline());
        Some(request.end(outcome, &mut self.pool))
    }

    /// Leaves a request out of steps while `held_back` is true, because its planes leave more slowly than it computes
    /// them.
    pub fn hold_back(&mut self, key: GraphKey, held_back: bool) {
        if let Some(request) = self.running_mut(key) {
            request.held_back = held_back;
        }
    }

    /// Ends a request whose planes will never arrive or never leave. The next plan ends it, or, if a step computes it,
    /// the first plan after that step. Does nothing for a request that is not held.
    pub fn fail_transfer(&mut self, key: GraphKey, why: TransferError) {
        if self.tickets.contains_key(&key) {
            self.failed_transfers.insert(key, why);
        }
    }

    fn running_mut(&mut self, key: GraphKey) -> Option<&mut Running> {
        self.running.get_mut(self.tickets.get(&key)?)
    }
}
