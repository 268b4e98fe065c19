//! Requests whose phases are divided between two workers: this worker prefills or encodes for another one, or decodes
//! after the prefill of another one.
//!
//! The scheduler moves no planes. The engine reports when a transfer is complete or has failed.

use tutti_proto::GraphKey;

use super::Scheduler;
use crate::{
    request::Running,
    step::{Ending, OutputToken, TransferError},
};

impl Scheduler {
    /// Continues a request whose [reserved](crate::Reserved) pages another worker has filled with the planes of
    /// `computed` tokens. That worker has also sampled the token `first`. On an error the request is unchanged; the
    /// error says why the request cannot continue.
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
        request.complete_import(first, computed, &mut self.planes)
    }

    /// Queues a request once the embeddings of its media have arrived. The request keeps its position in the order.
    /// False if the request waits for no embeddings.
    pub fn media_here(&mut self, key: GraphKey) -> bool {
        let Some(&ticket) = self.tickets.get(&key) else { return false };
        let Some(request) = self.parked.get_mut(&ticket).filter(|request| request.awaits_media) else {
            return false;
        };
        request.awaits_media = false;
        self.unpark(ticket);
        true
    }

    /// Ends a request that was prefilled or encoded for another worker, once its planes or embeddings are copied, and
    /// frees its pages. None if the request is not held, has not finished its prefill, or exports nothing.
    pub fn complete_export(&mut self, key: GraphKey) -> Option<Ending> {
        let ticket = *self.tickets.get(&key)?;
        let outcome = self.running.get(&ticket)?.export_outcome()?;
        self.end_running(ticket, key, outcome)
    }

    /// Leaves a request out of steps while `held_back` is true, because the request computes planes faster than they
    /// can be sent to the other worker.
    pub fn hold_back(&mut self, key: GraphKey, held_back: bool) {
        if let Some(request) = self.running_mut(key) {
            request.held_back = held_back;
        }
    }

    /// Ends a request whose planes will never arrive or never leave. The next plan ends the request. Does nothing for a
    /// request that is not held.
    pub fn fail_transfer(&mut self, key: GraphKey, why: TransferError) {
        if self.tickets.contains_key(&key) {
            self.failed_transfers.insert(key, why);
        }
    }

    fn running_mut(&mut self, key: GraphKey) -> Option<&mut Running> {
        self.running.get_mut(self.tickets.get(&key)?)
    }
}
