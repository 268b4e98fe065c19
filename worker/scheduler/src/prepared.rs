//! Decode rows that are prepared for the next plan while the device still runs the current step.
//!
//! Most rows of a step are decodes, and all of a decode row but its input token is known before the step before it
//! returns; the engine fills the token in. Rows are prepared on the assumption that the step succeeds and ends no
//! request. Once the step is committed, the plan takes each prepared row whose assumption held, drops the others, and
//! makes the missing rows afresh.
//!
//! Arrivals, ends and the duration of the step are not known ahead. Admission, preemption and the share of each prefill
//! follow from them and stay with the plan. So a plan with prepared rows is, row by row, the plan that would have been
//! made without them, and a prepared row holds no page and no slot.

use std::{collections::BTreeMap, iter::Peekable, vec};

use crate::{
    request::{Running, Ticket},
    step::Row,
};

/// Decode rows that the next plan may take: at most one for each request, in the order of their tickets.
#[derive(Debug)]
pub(crate) struct PreparedDecodes(Peekable<vec::IntoIter<Row>>);

impl Default for PreparedDecodes {
    fn default() -> Self {
        Self(vec![].into_iter().peekable())
    }
}

impl PreparedDecodes {
    /// Prepares the next decode of every request that will decode.
    pub fn new(running: &BTreeMap<Ticket, Running>, page_tokens: usize) -> Self {
        let mut rows = Vec::with_capacity(running.len());
        rows.extend(running.iter().filter_map(|(&ticket, request)| request.next_decode(ticket, page_tokens)));
        Self(rows.into_iter().peekable())
    }

    /// Takes the row of a request, if one was prepared and it still `holds`. Requests must be asked for in order: the
    /// rows of the requests before this one are dropped.
    pub fn take(&mut self, ticket: Ticket, holds: impl FnOnce(&Row) -> bool) -> Option<Row> {
        while self.0.next_if(|row| row.ticket < ticket).is_some() {}
        self.0.next_if(|row| row.ticket == ticket).filter(holds)
    }
}
