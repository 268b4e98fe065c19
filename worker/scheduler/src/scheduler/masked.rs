//! Requests whose output follows a constraint.
//!
//! The scheduler knows no masks. The engine reports when one is ready, when the output is complete, and when the
//! constraint cannot be followed.

use tutti_proto::GraphKey;

use super::Scheduler;
use crate::{
    request::Request,
    step::{ConstraintFailure, Ending, Outcome},
    stopping::Finish,
    ticket::Ticket,
};

/// The end of a request outside of a step, by its constraint.
#[derive(Debug)]
pub(super) enum ConstraintEnd {
    Complete,
    Failed(ConstraintFailure),
}

impl Scheduler {
    /// Allows or forbids that a row of the request is planned whose mask depends on a token of one row in flight. The
    /// engine then makes the mask between the two. Forbidden at first. Does nothing for a request that is not held.
    pub fn run_ahead(&mut self, key: GraphKey, runs_ahead: bool) {
        if let Some(request) = self.request_mut(key) {
            request.runs_ahead = runs_ahead;
        }
    }

    /// Leaves a request out of steps until the mask of its next token [is ready](Self::mask_ready). Does nothing for a
    /// request that is not held.
    pub fn await_mask(&mut self, key: GraphKey) {
        if let Some(request) = self.request_mut(key) {
            request.awaits_mask = true;
        }
    }

    /// Continues a request whose next mask is ready. A request that has not been admitted keeps its position in the
    /// order. Does nothing for a request that is not held.
    pub fn mask_ready(&mut self, key: GraphKey) {
        if let Some(request) = self.request_mut(key) {
            request.awaits_mask = false;
        }
        if let Some(&ticket) = self.tickets.get(&key) {
            self.unpark(ticket);
        }
    }

    /// Ends a request whose output is complete. The next plan ends it. Does nothing for a request that is not held.
    pub fn complete_output(&mut self, key: GraphKey) {
        if self.tickets.contains_key(&key) {
            self.constrained.insert(key, ConstraintEnd::Complete);
        }
    }

    /// Ends a request whose constraint cannot be followed. The next plan ends it. Does nothing for a request that is
    /// not held.
    pub fn fail_constraint(&mut self, key: GraphKey, why: ConstraintFailure) {
        if self.tickets.contains_key(&key) {
            self.constrained.insert(key, ConstraintEnd::Failed(why));
        }
    }

    /// Lets a request end from now on, although its output has fewer than `min_tokens` tokens: its constraint allows
    /// nothing else. Does nothing for a request that is not held.
    pub fn waive_min_tokens(&mut self, key: GraphKey) {
        if let Some(request) = self.request_mut(key) {
            request.stopping.waive_min_tokens();
        }
    }

    pub(super) fn end_constrained(&mut self, key: GraphKey, end: ConstraintEnd) -> Option<Ending> {
        let outcome = match end {
            ConstraintEnd::Complete => self.request_mut(key)?.finished(Finish::Complete),
            ConstraintEnd::Failed(why) => Outcome::ConstraintFailed(why),
        };
        self.end(key, outcome)
    }

    /// Moves a request that waits for nothing but pages from the parked requests to the waiting ones.
    pub(super) fn unpark(&mut self, ticket: Ticket) {
        let waits = |request: &Request| request.awaits_media || request.awaits_mask;
        if self.parked.get(&ticket).is_some_and(|request| !waits(request))
            && let Some(request) = self.parked.remove(&ticket)
        {
            self.wait(ticket, request);
        }
    }

    /// The data of a held request in any state.
    fn request_mut(&mut self, key: GraphKey) -> Option<&mut Request> {
        let ticket = self.tickets.get(&key)?;
        if let Some(request) = self.running.get_mut(ticket) {
            return Some(request.request_mut());
        }
        self.waiting.get_mut(ticket).or_else(|| self.parked.get_mut(ticket))
    }
}
