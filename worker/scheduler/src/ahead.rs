//! What is ready of the next plan while the device still runs this one.
//!
//! Most rows of a step are decodes, and most of those are known before the step ahead of them is back: all but the token
//! that it samples, which the engine fills in. So they are made on the supposition that the step goes well and ends
//! nobody. When it has been committed the plan is settled: a row whose supposition came true becomes part of it, any other
//! leaves, and whoever is not there yet gets a row as if none had been ready. What is not known ahead is who comes, who
//! goes and how long the step took; admission, preemption and the share of each prefill follow from that and stay with the
//! plan. So a settled plan is, row by row, the one that would have been made without, and nothing that is ready holds a
//! page, a place or a promise.

use std::{collections::BTreeMap, iter::Peekable, vec};

use crate::{
    request::{Running, Ticket},
    step::Row,
};

/// Decodes that the next plan may take; in order of their tickets, one at most of each request.
#[derive(Debug)]
pub(crate) struct Ahead(Peekable<vec::IntoIter<Row>>);

impl Default for Ahead {
    fn default() -> Self {
        Self(vec![].into_iter().peekable())
    }
}

impl Ahead {
    /// The next decode of everybody who will decode.
    pub fn new(running: &BTreeMap<Ticket, Running>, page_tokens: usize) -> Self {
        let mut rows = Vec::with_capacity(running.len());
        rows.extend(running.iter().filter_map(|(&ticket, request)| request.next_decode(ticket, page_tokens)));
        Self(rows.into_iter().peekable())
    }

    /// The row of a request if there is one and it `holds`. Requests are asked for in order; what is ready of those that
    /// are left out is gone then.
    pub fn settle(&mut self, ticket: Ticket, holds: impl FnOnce(&Row) -> bool) -> Option<Row> {
        while self.0.next_if(|row| row.ticket < ticket).is_some() {}
        self.0.next_if(|row| row.ticket == ticket).filter(holds)
    }
}
